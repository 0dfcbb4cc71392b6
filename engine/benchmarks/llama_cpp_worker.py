"""llama.cpp as a peer: runs in an environment of its own, takes jobs as JSON lines, answers with rates.

Uses the low-level batch API of llama-cpp-python, so that nothing of Python's wrappers is in the way.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp as llama

SILENT = llama.llama_log_callback(lambda *_: None)  # kept alive: C holds the pointer
UBATCH = 512


def load(path: str):
    llama.llama_log_set(SILENT, ctypes.c_void_p(0))
    llama.llama_backend_init()
    return llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())


def quantise(source: str, target: str) -> None:
    """Write `source` again as Q4_0, the format llama.cpp repacks for this kind of CPU."""
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = llama.LLAMA_FTYPE_MOSTLY_Q4_0, True, 2
    if llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise RuntimeError("llama.cpp could not quantise the file")


class Context:
    """A context of `streams` sequences and a batch to fill."""

    def __init__(self, model, streams: int, length: int, threads: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = streams * length, streams
        params.n_batch, params.n_ubatch = 2048, UBATCH
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.handle = llama.llama_init_from_model(model, params)
        self.batch = llama.llama_batch_init(2048, 0, 1)
        self.size = 0

    def put(self, token: int, position: int, stream: int, wants_logits: bool) -> None:
        i, batch = self.size, self.batch
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
        batch.seq_id[i][0], batch.logits[i] = stream, wants_logits
        self.size += 1

    def decode(self) -> None:
        self.batch.n_tokens, self.size = self.size, 0
        if llama.llama_decode(self.handle, self.batch):
            raise RuntimeError("llama_decode failed")

    def close(self) -> None:
        llama.llama_batch_free(self.batch)
        llama.llama_free(self.handle)


def decode_rate(model, streams: int, prompt: int, steps: int, threads: int) -> float:
    """Tokens a second of `streams` sequences, `steps` each, after prompts of `prompt` tokens."""
    context = Context(model, streams, prompt + steps + 8, threads)
    for i in range(prompt):
        context.put(1000 + (i * 7) % 40000, i, 0, i == prompt - 1)
    context.decode()
    for stream in range(1, streams):  # the prompt's state is copied: only decoding is measured
        llama.llama_memory_seq_cp(llama.llama_get_memory(context.handle), 0, stream, -1, -1)
    context_ready = time.perf_counter()
    for step in range(steps):
        for stream in range(streams):
            context.put(2000 + step, prompt + step, stream, True)
        context.decode()
        llama.llama_get_logits_ith(context.handle, 0)  # waits for the step
    elapsed = time.perf_counter() - context_ready
    context.close()
    return streams * steps / elapsed


def prompt_rate(model, length: int, threads: int) -> float:
    context = Context(model, 1, length + 8, threads)
    for i in range(length):
        context.put(1000 + (i * 7) % 40000, i, 0, i == length - 1)
    start = time.perf_counter()
    context.decode()
    llama.llama_get_logits_ith(context.handle, -1)
    elapsed = time.perf_counter() - start
    context.close()
    return length / elapsed


def main() -> None:
    models = {"q4_1": load(sys.argv[1])}
    if len(sys.argv) > 2:
        quantise(sys.argv[1], sys.argv[2])
        models["q4_0"] = load(sys.argv[2])
    print(json.dumps({"ready": llama.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        model, threads = models[job["model"]], job["threads"]
        if job["kind"] == "prompt":
            rate = prompt_rate(model, job["length"], threads)
        else:
            rate = decode_rate(model, job["streams"], job["prompt"], job["steps"], threads)
        print(json.dumps({"rate": rate}), flush=True)


if __name__ == "__main__":
    main()
