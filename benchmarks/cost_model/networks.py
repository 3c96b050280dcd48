"""The networks that cost models are judged on: an encoder like MiniLM, one like ViT, and a ResNet, by factory.

Latency does not depend on the values of weights, so they are random; widths and depths are those of models in use, and
the vocabulary is small to keep files small.
"""

from __future__ import annotations

import torch
import transformers as hf


def _seeded(build):
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = build().eval()
    torch.random.set_rng_state(state)
    return model


def minilm_like(batch: int = 1, tokens: int = 64):
    config = hf.BertConfig(
        vocab_size=1000, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    ids = torch.arange(batch * tokens).reshape(batch, tokens) % 1000
    model = _seeded(lambda: hf.BertModel(config, add_pooling_layer=False))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def vit_like(batch: int = 1):
    config = hf.ViTConfig(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1024,
        image_size=160,
        patch_size=16,
    )
    model = _seeded(lambda: hf.ViTModel(config, add_pooling_layer=False))
    return model, {"pixel_values": torch.zeros(batch, 3, 160, 160)}


def resnet_like(batch: int = 1):
    config = hf.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=100
    )
    return _seeded(lambda: hf.ResNetForImageClassification(config)), {"pixel_values": torch.zeros(batch, 3, 128, 128)}


def minilm_like_batched():
    return minilm_like(batch=64, tokens=128)


def vit_like_batched():
    return vit_like(batch=64)


def resnet_like_batched():
    return resnet_like(batch=64)
