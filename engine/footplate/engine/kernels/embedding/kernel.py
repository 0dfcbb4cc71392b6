"""Looking up rows of a token table in Triton."""

import torch
import triton
import triton.language as tl

COLUMNS = 1024
NUM_WARPS = 4


@triton.jit
def _embedding_kernel(
    token_ids,
    table,
    output,
    size,
    scale,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(token_ids + token).to(tl.int64)
    values = tl.load(table + row * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * size + column, (values * scale).to(output.dtype.element_ty), mask=inside)


def embedding(
    token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0, *, use_pdl: bool = False
) -> torch.Tensor:
    """Rows of the table [vocabulary, K], times the scale in the table's type: ids [T] -> [T, K].

    Ids are not checked against the table.
    """
    if not table.is_contiguous() or token_ids.stride(0) != 1:
        raise ValueError("embedding needs a contiguous table and ids that lie side by side")
    num_tokens, size = token_ids.shape[0], table.shape[1]
    output = torch.empty((num_tokens, size), dtype=table.dtype, device=table.device)
    if num_tokens:
        _embedding_kernel[(num_tokens, triton.cdiv(size, COLUMNS))](
            token_ids,
            table,
            output,
            size,
            torch.tensor(scale, dtype=table.dtype).item(),
            COLUMNS=COLUMNS,
            USE_PDL=use_pdl,
            num_warps=NUM_WARPS,
            **({"launch_pdl": True} if use_pdl else {}),
        )
    return output
