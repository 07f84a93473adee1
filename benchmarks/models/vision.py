"""Encoders of images: ViT-L, timm's where that is installed, else transformers'; Swin-B with its biased, masked windows."""

from functools import partial

import torch
import torch.nn.functional as F

from .case import Case, Model, at_least_float32, transformers_model, with_random_weights

VIT = {"full": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
                "image_size": 224},
       "small": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                 "image_size": 96}}  # fmt: skip
SWIN = {"full": {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "window_size": 7, "image_size": 224},
        "small": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 64}}  # fmt: skip
IMAGES = {"full": 64, "small": 2}
CLASSES = 1000


def make_vit(size):
    shape = VIT[size]
    try:
        import timm
    except ImportError:
        import transformers

        config = transformers.ViTConfig(**shape, patch_size=16, num_labels=CLASSES)
        return transformers_model(transformers.ViTForImageClassification, config)
    module = timm.create_model("vit_large_patch16_224", img_size=shape["image_size"], embed_dim=shape["hidden_size"],
                               depth=shape["num_hidden_layers"], num_heads=shape["num_attention_heads"],
                               num_classes=CLASSES)  # fmt: skip
    return with_random_weights(module), f"timm {timm.__version__}"


def make_swin(size):
    import transformers

    config = transformers.SwinConfig(**SWIN[size], patch_size=4, num_labels=CLASSES, drop_path_rate=0.0)
    return transformers_model(transformers.SwinForImageClassification, config)


def images(size, shape):
    side = shape[size]["image_size"]
    return {"pixels": torch.randn(IMAGES[size], 3, side, side)}


def labelled_images(size, shape):
    return images(size, shape) | {"labels": torch.randint(CLASSES, (IMAGES[size],))}


def logits(module, pixels):
    out = module(pixels)
    return out if isinstance(out, torch.Tensor) else out.logits


def classification_loss(module, pixels, labels):
    return F.cross_entropy(at_least_float32(logits(module, pixels)), labels)


VIT_L, SWIN_B = Model("vit-l", make_vit, ("ViTLayer", "Block")), Model("swin-b", make_swin, ("SwinLayer",))
CASES = []
for _model, _shape in ((VIT_L, VIT), (SWIN_B, SWIN)):
    CASES += [Case(_model, "train", partial(labelled_images, shape=_shape), classification_loss, train=True),
              Case(_model, "infer", partial(images, shape=_shape), logits, train=False)]  # fmt: skip
