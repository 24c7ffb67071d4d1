"""Every gradient of a convolution: correct, explained, replaceable, fast."""

__version__ = "0.1.0"
