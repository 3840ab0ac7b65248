"""tritonmoe: runs Mixture-of-Experts language models, exactly as they are."""

from tritonmoe.engine import Engine, TextStream
from tritonmoe.errors import TritonMoeError
from tritonmoe.generation import Generation
from tritonmoe.sampling import SamplingParams

__all__ = ["Engine", "Generation", "SamplingParams", "TextStream", "TritonMoeError"]
__version__ = "0.1.0"
