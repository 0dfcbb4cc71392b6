"""The token channel: how tokens travel from engine replicas to gateways, one message per engine step.

`frames` is the byte format, `handshake` the mutual proof, `hub` the gateway's end, `outlet` the engine's.
"""
