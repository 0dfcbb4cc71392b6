"""KV memory as bookkeeping: blocks, their owners and the prefix index. No tensors here."""
