"""Attention of tokens that do not see everything before them, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels import checks
from kvbench.kernels.operands import PLAIN, Softmax, Window
from kvbench.kernels.reference.pages import Operations

WINDOW_ROWS = 256  # queries whose keys are looked at together


class WindowOperations(Operations):
    """Prompt operations on layers with a window; see `Backend` for the shapes.

    Masks have the size of a block of queries times its windows, never of the prompt squared.
    """

    def window_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        history: tuple[Tensor, Tensor, Tensor] | None,
        first: int,
        window: Window,
        scale: float,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """Attention of tokens that follow one another to what their window holds of a history and of themselves.

        Args:
            q: [Hq, n, D].
            k, v: [H, n, D].
            history: Keys and values [H, M, D] of tokens before them, and int64 [H, M] their positions, -1 where there
                is none; None = nothing comes before.
            first: Position of the first of the tokens.
            window: Attention window of each query.
            softmax: Caps and sinks of the layer.

        Returns:
            [Hq, n, D] in the dtype of `q`.
        """
        checks.prompt(q, k, v, softmax)
        heads, length, head_dim = k.shape
        grouped = q.view(heads, -1, length, head_dim)
        positions = torch.arange(first, first + length, device=q.device).expand(heads, -1)
        out = torch.empty_like(grouped)
        for begin in range(0, length, WINDOW_ROWS):
            end, low = min(length, begin + WINDOW_ROWS), max(0, begin + 1 - window.num_tokens)
            keys, values, position = k[:, low:end], v[:, low:end], positions[:, low:end]
            if history is not None and begin < window.num_tokens:  # later ones see nothing of it
                past_k, past_v, past = history
                keys, values = (torch.cat([x.to(y), y], 1) for x, y in ((past_k, keys), (past_v, values)))
                position = torch.cat([past, position], 1)
            mask, shape = window.sees(positions[:, begin:end], position)[:, None], (-1, grouped.shape[1], -1, -1)
            rows, keys, values = grouped[:, :, begin:end], keys[:, None], values[:, None]
            if softmax.is_plain:
                keys, values = keys.expand(shape), values.expand(shape)
                output = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
            else:
                logits = softmax.capped(torch.matmul(rows.float() * scale, keys.float().transpose(2, 3)))
                output = torch.matmul(softmax.probabilities(logits.masked_fill(~mask, float("-inf"))), values.float())
            out[:, :, begin:end] = output
        return out.flatten(0, 1)
