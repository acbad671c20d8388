"""Attention for decoding with grouped queries, as a transformers attention implementation."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "rlix_decoding"


def decoding_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' "sdpa", but for single tokens the query heads of a key head are taken as its query positions.

    Otherwise keys and values would be repeated for every query head in each step, which costs more than the attention.

    Args: query (rows, heads, length, dim); key, value (rows, key heads, positions, dim).
    Returns: (rows, length, heads, dim).
    """
    rows, heads, length, dim = query.shape
    key_heads = key.shape[1]
    if length > 1 or heads == key_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(rows, key_heads, heads // key_heads, dim)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, decoding_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
