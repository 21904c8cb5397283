"""The part of torchvision that transformers' processor of the Qwen-VL family calls for images, in torch alone.

For vLLM's CPU build, for whose torch there is no build of torchvision: put the folder above on PYTHONPATH.
"""

__version__ = "0.28.0"
