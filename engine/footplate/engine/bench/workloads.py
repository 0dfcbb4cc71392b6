"""Fixed loads, so that every figure of Footplate and of its peers is measured on the same work.

Each function returns plain values (token counts, token ids, or texts) from fixed seeds; nothing here imports
an engine. Token ids are uniform in [LOW, HIGH): valid for every vocabulary of 128k and more; pass `high` for
smaller ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LOW, HIGH = 1000, 128_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request: prompt token ids, number of output tokens (EOS ignored), and the tenant that sends it."""

    prompt_token_ids: list[int]
    output_len: int
    tenant: str = "t0"


def _ids(rng: random.Random, n: int, high: int) -> list[int]:
    return [rng.randrange(LOW, high) for _ in range(n)]


def single(high: int = HIGH, seed: int = 1) -> list[Job]:
    """One stream: 128 tokens in, 256 out."""
    return [Job(_ids(random.Random(seed), 128, high), 256)]


def decode(batch: int, high: int = HIGH, seed: int = 2) -> list[Job]:
    """`batch` equal streams: 512 in, 256 out. Report ITL as (wall(256) - wall(1)) / 255."""
    rng = random.Random(seed)
    return [Job(_ids(rng, 512, high), 256) for _ in range(batch)]


def prefill(n: int, high: int = HIGH, seed: int = 3) -> list[Job]:
    """One prompt of `n` tokens (8192 or 32768), one token out: time to first token."""
    return [Job(_ids(random.Random(seed), n, high), 1)]


def mixed_lengths(count: int = 1000, seed: int = 20260713) -> list[tuple[int, int]]:
    """(input, output) lengths, log-normal, clipped to 4..1024; means 222.7 and 200.5 for 1000."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(count):
        n_in = min(1024, max(4, round(rng.lognormvariate(5.10, 0.8))))
        n_out = min(1024, max(4, round(rng.lognormvariate(5.04, 0.7))))
        lengths.append((n_in, n_out))
    return lengths


def mixed(count: int = 1000, scale: float = 1.0, high: int = HIGH, seed: int = 4) -> list[Job]:
    """The mixed load, all submitted at once.

    `scale` shrinks lengths: 0.25 with count=64 is the CPU form, with `high` below the vocabulary (49_000 for
    SmolLM2)."""
    rng = random.Random(seed)
    return [
        Job(_ids(rng, max(4, int(i * scale)), high), max(4, int(o * scale))) for i, o in mixed_lengths(count)
    ]


def prefix(
    groups: int = 64,
    per_group: int = 16,
    shared: int = 2048,
    fresh: int = 128,
    out: int = 64,
    high: int = HIGH,
    seed: int = 5,
) -> list[Job]:
    """Groups that share a prefix, shuffled: RAG and agents with fat system prompts. One tenant a group."""
    rng = random.Random(seed)
    prefixes = [_ids(rng, shared, high) for _ in range(groups)]
    jobs = [
        Job(prefixes[g] + _ids(rng, fresh, high), out, f"t{g}")
        for g in range(groups)
        for _ in range(per_group)
    ]
    random.Random(7).shuffle(jobs)
    return jobs


def chat_sessions(
    sessions: int = 64,
    turns: int = 6,
    tenants: int = 8,
    system: int = 512,
    user: int = 48,
    answer: int = 96,
    high: int = HIGH,
    seed: int = 6,
) -> list[list[Job]]:
    """Multi-turn chats: session s, turn k re-sends all before it. A tenant has one system prompt.

    Returns one list of jobs a session; turn k+1 may start only after turn k ended. The answer's ids are drawn
    here, so the next turn's prompt is fixed whatever the model says.
    """
    rng = random.Random(seed)
    systems = [_ids(rng, system, high) for _ in range(tenants)]
    out = []
    for s in range(sessions):
        history, jobs, t = list(systems[s % tenants]), [], f"t{s % tenants}"
        for _ in range(turns):
            history += _ids(rng, max(4, int(rng.expovariate(1 / user))), high)
            n = max(4, int(rng.expovariate(1 / answer)))
            jobs.append(Job(list(history), n, t))
            history += _ids(rng, n, high)
        out.append(jobs)
    return out


def noisy_neighbour(
    monster: int = 7680, chats: int = 32, high: int = 49_000, seed: int = 8
) -> tuple[list[Job], list[Job]]:
    """(tenant A's endless monster prompts, tenant B's chats): B's p99 inter-token time, alone or beside A."""
    rng = random.Random(seed)
    a = [Job(_ids(rng, monster, high), 8, "noisy") for _ in range(16)]
    b = [Job(_ids(rng, 64, high), 64, "quiet") for _ in range(chats)]
    return a, b


def arrivals(rate_per_s: float, seconds: float, burstiness: float = 1.0, seed: int = 9) -> list[float]:
    """Arrival times: gamma gaps with mean 1/rate; burstiness 1 is Poisson, below 1 is burstier."""
    rng = random.Random(seed)
    t, out = 0.0, []
    while t < seconds:
        t += rng.gammavariate(burstiness, 1 / (rate_per_s * burstiness))
        out.append(t)
    return out[:-1]
