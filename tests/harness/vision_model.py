"""A tiny random Qwen2-VL with a byte-level tokenizer, and images for it."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.types import ImageSpan

SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
START, END, PAD = 259, 260, 262
"""The ids of `<|vision_start|>`, `<|vision_end|>` and `<|image_pad|>`."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type in ['image', 'image_url'] %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIN_PIXELS, MAX_PIXELS = 784, 12_544


def png(width: int, height: int, color: tuple[int, int, int]) -> bytes:
    """Return a PNG file of one color."""
    rows = b"".join(b"\0" + bytes(color) * width for _ in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """Return a file as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    """Return an image as a content part of chat completions."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def save_processor(directory: Path) -> None:
    """Everything of the checkpoint but its weights and config: tokenizer, template, processor."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
    )
    fast.save_pretrained(directory)
    written = directory / "tokenizer_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"processor_class": "Qwen2VLProcessor"}))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


def vision_config(length: int = 2048) -> Any:
    """Two layers that speak and one that sees. `length`: the longest request."""
    from transformers import Qwen2VLConfig

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
    return Qwen2VLConfig(
        text_config={
            "vocab_size": 256 + len(SPECIALS),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": length,
            "rope_parameters": rope,
            "bos_token_id": None,
            "eos_token_id": 258,
            "pad_token_id": 256,
        },
        vision_config={
            "depth": 1,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        image_token_id=PAD,
        video_token_id=263,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
        dtype="float32",
    )


def save_without_weights(directory: Path) -> None:
    """Save the processor and the config: all that a gateway reads of a checkpoint."""
    save_processor(directory)
    vision_config().save_pretrained(directory)


def save_vision_model(directory: Path, seed: int, *, scale: float = 3.0, length: int = 2048) -> None:
    """Random weights; `scale` makes the distribution clearly not uniform. `length`: the longest request."""
    import torch
    from transformers import Qwen2VLForConditionalGeneration

    directory.mkdir(parents=True, exist_ok=True)
    save_processor(directory)
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(vision_config(length)).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    model.save_pretrained(directory)


def vision_logprobs(
    directory: Path, ids: Sequence[int], files: Mapping[str, bytes], images: Sequence[ImageSpan]
) -> Any:
    """Return the log-probability of every token but the first by transformers' own model and processor, as an array."""
    import io

    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration.from_pretrained(directory).float().eval()
    processor = AutoImageProcessor.from_pretrained(directory)
    pictures = [Image.open(io.BytesIO(files[image.hash])) for image in images]
    seen = processor(pictures, return_tensors="pt")
    row = torch.tensor([list(ids)])
    kinds = (row == PAD).int()
    with torch.no_grad():
        logits = model(
            input_ids=row, attention_mask=torch.ones_like(row), mm_token_type_ids=kinds, **seen
        ).logits[0]
    scores = logits[:-1].float().log_softmax(-1)
    return scores.gather(-1, row[0, 1:, None])[:, 0].numpy()
