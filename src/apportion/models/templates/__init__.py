"""Small networks whose every block is spelled out in their config, for searching over them: they load from a folder."""

from apportion.models.templates.mobile_cnn import MobileCnnConfig, MobileCnnForImageClassification
from apportion.models.templates.small_encoder import SmallEncoderConfig, SmallEncoderForImageClassification

ARCHITECTURES = {
    "MobileCnnForImageClassification": MobileCnnForImageClassification,
    "SmallEncoderForImageClassification": SmallEncoderForImageClassification,
}

__all__ = [
    "ARCHITECTURES",
    "MobileCnnConfig",
    "MobileCnnForImageClassification",
    "SmallEncoderConfig",
    "SmallEncoderForImageClassification",
]
