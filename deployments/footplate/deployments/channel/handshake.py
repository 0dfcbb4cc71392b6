"""Mutual proof that both ends of a token channel hold the channel key. Pure: bytes in, bytes out.

    engine  -> HELLO      who I am, my nonce
    gateway -> CHALLENGE  its nonce, HMAC(key, "gateway", hello, its nonce)
    engine  -> PROOF      HMAC(key, "engine", hello, its nonce)
    gateway -> WELCOME

Both digests cover both nonces and the name the engine gave, so none can be replayed or relabelled. The frames
that follow are not signed one by one: between nodes the channel belongs inside TLS or a private network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from footplate.deployments.channel.frames import VERSION
from footplate.deployments.errors import ChannelRefused

MAX_HANDSHAKE_BYTES = 1024
_NO_PROOF = "the {} did not prove that it holds the channel key; check the master key file"
NONCE_BYTES = 32


class Hello(msgspec.Struct, array_like=True):
    """Who dials: the model an engine replica serves and the replica's index, which labels its statistics."""

    version: int
    model: str
    engine: str
    nonce: bytes


class Challenge(msgspec.Struct, array_like=True):
    """The gateway's nonce and its own proof."""

    nonce: bytes
    digest: bytes


def _digest(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    # The hello's length is fixed in front, so that no two (hello, nonce) pairs give the same message.
    message = role + len(hello).to_bytes(4, "little") + hello + nonce
    return hmac.digest(key, message, hashlib.sha256)


class Dialer:
    """The engine's half of one handshake."""

    def __init__(self, key: bytes, model: str, engine: str) -> None:
        self._key = key
        self.hello = msgspec.msgpack.encode(Hello(VERSION, model, engine, secrets.token_bytes(NONCE_BYTES)))

    def prove(self, payload: bytes) -> bytes:
        """Check the gateway's challenge and give the proof to send back.

        Raises:
            ChannelRefused: the gateway doesn't hold our key.
        """
        try:
            challenge = msgspec.msgpack.decode(payload, type=Challenge)
        except msgspec.DecodeError as error:
            raise ChannelRefused("the gateway's challenge can't be read") from error
        expected = _digest(self._key, b"gateway", self.hello, challenge.nonce)
        if len(challenge.nonce) != NONCE_BYTES or not hmac.compare_digest(expected, challenge.digest):
            raise ChannelRefused(_NO_PROOF.format("gateway"))
        return _digest(self._key, b"engine", self.hello, challenge.nonce)


class Doorkeeper:
    """The gateway's half of one handshake."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._hello = b""

    def challenge(self, payload: bytes) -> tuple[Hello, bytes]:
        """Read a hello; give it and the challenge to send back.

        Raises:
            ChannelRefused: no hello of ours.
        """
        try:
            hello = msgspec.msgpack.decode(payload, type=Hello)
        except msgspec.DecodeError as error:
            raise ChannelRefused("the peer's hello can't be read") from error
        if hello.version != VERSION or len(hello.nonce) != NONCE_BYTES or self._hello:
            raise ChannelRefused("the peer's hello has another version, a short nonce, or came twice")
        self._hello = payload
        answer = Challenge(self._nonce, _digest(self._key, b"gateway", payload, self._nonce))
        return hello, msgspec.msgpack.encode(answer)

    def check(self, proof: bytes) -> None:
        """Check the engine's proof.

        Raises:
            ChannelRefused: wrong proof, or a proof before the hello.
        """
        expected = _digest(self._key, b"engine", self._hello, self._nonce)
        if not self._hello or not hmac.compare_digest(expected, proof):
            raise ChannelRefused(_NO_PROOF.format("engine replica"))
