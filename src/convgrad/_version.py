"""The version, where the command line and the build find it without PyTorch."""

__version__ = "0.1.0"
