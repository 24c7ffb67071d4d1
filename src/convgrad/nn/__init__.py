"""Modules with torch's constructors, repr and state_dict, computed by convgrad."""

from .feedback import (
    FeedbackConv1d,
    FeedbackConv2d,
    FeedbackConv3d,
    FeedbackConvTranspose1d,
    FeedbackConvTranspose2d,
    FeedbackConvTranspose3d,
    convert_feedback_,
)
from .modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "FeedbackConv1d",
    "FeedbackConv2d",
    "FeedbackConv3d",
    "FeedbackConvTranspose1d",
    "FeedbackConvTranspose2d",
    "FeedbackConvTranspose3d",
    "convert_feedback_",
]
