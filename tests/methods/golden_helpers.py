"""Prompts whose attention is what a test wants, for stores without a model.

Keys are unit vectors, and queries the logarithms of the wanted probabilities.
"""

import torch

HIDDEN = -60.0  # a logit that leaves nothing of a probability in fp32


def queries_for(matrix: list[list[float]], head_dim: int = 8) -> torch.Tensor:
    """Queries [N, D] whose softmax over the unit vectors 0 .. N-1 is each row of probabilities [N, up to N]."""
    q = torch.full((len(matrix), head_dim), HIDDEN)
    for index, row in enumerate(matrix):
        assert abs(sum(row) - 1) < 1e-6, f"row {index} of the wanted attention sums to {sum(row)}"
        for key, probability in enumerate(row):
            if probability > 0:
                q[index, key] = torch.tensor(probability, dtype=torch.float64).log().float()
    return q


def read_prompt(store, heads: list[list[list[float]]], num_kv_heads: int = 1, layer: int = 0, row: int | None = None):
    """Gives a store a prompt that every query head attends to as its matrix says; returns the row.

    Args:
        heads: Per query head, rows of probabilities: row i over the tokens 0 .. i.
        num_kv_heads: KV heads; all have the same keys.
        row: Of a prompt whose earlier layers were read already.
    """
    head_dim, length = store.shape.head_dim, len(heads[0])
    row = store.open_row() if row is None else row
    q = torch.stack([queries_for(matrix, head_dim) for matrix in heads])
    k = torch.eye(head_dim)[None, :length].expand(num_kv_heads, -1, -1)
    store.prefill_layer(row, layer, q, k, k, 1.0)
    return row


def own_rows(length: int) -> list[list[float]]:
    """Queries that each attend to themselves alone."""
    return [[0.0] * index + [1.0] for index in range(length)]
