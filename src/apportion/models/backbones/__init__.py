"""Pretrained backbones that registry packages carry, as transformers models that can be traced, sliced and saved."""

from apportion.models.backbones.efficientnet_lite import EfficientNetLiteConfig, EfficientNetLiteModel

ARCHITECTURES = {"EfficientNetLiteModel": EfficientNetLiteModel}

__all__ = ["ARCHITECTURES", "EfficientNetLiteConfig", "EfficientNetLiteModel"]
