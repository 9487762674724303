"""PEFT, diffusers and frameworks: small models of theirs in ordinary steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from corpus.hugging_face import Family, noise, text, train
from harness import Run


def _adapted(kind: str, quantized: Callable[[Any], None] | None = None, **options: Any) -> Callable[[], Run]:
    """A small Llama with adapters of PEFT, over weights that torchao quantized or over its own."""

    def prepare(model: Any) -> Any:
        import peft

        if quantized is not None:
            quantized(model)
        return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).train()

    return Family("LlamaConfig", "LlamaForCausalLM", text, prepare=prepare).run


def _int8_weights(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda layer, name: name.endswith("_proj"))


LINEAR = ["q_proj", "v_proj"]
PEFT: dict[str, Callable[[], Run]] = {
    "lora": _adapted("LoraConfig", r=2, lora_dropout=0.1, target_modules=LINEAR),
    "lora_on_int8_weights": _adapted("LoraConfig", _int8_weights, r=2, target_modules=LINEAR),
    "dora": _adapted("LoraConfig", r=2, use_dora=True, target_modules=LINEAR),
    "rslora": _adapted("LoraConfig", r=2, use_rslora=True, target_modules=LINEAR),
    "lora_bias_and_head": _adapted("LoraConfig", r=2, bias="all", target_modules=LINEAR, modules_to_save=["lm_head"]),
    "adalora": _adapted("AdaLoraConfig", init_r=4, target_r=2, total_step=20, target_modules=LINEAR),
    "loha": _adapted("LoHaConfig", r=2, target_modules=LINEAR),
    "lokr": _adapted("LoKrConfig", r=2, target_modules=LINEAR),
    "ia3": _adapted("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": _adapted("OFTConfig", oft_block_size=4, target_modules=LINEAR),
    "boft": _adapted("BOFTConfig", boft_block_size=4, target_modules=LINEAR),
    "vera": _adapted("VeraConfig", r=2, target_modules=LINEAR),
    "prefix_tuning": _adapted("PrefixTuningConfig", num_virtual_tokens=3),
    "prompt_tuning": _adapted("PromptTuningConfig", num_virtual_tokens=3),
    "p_tuning": _adapted("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=16),
    "layer_norm_tuning": _adapted("LNTuningConfig", target_modules=["input_layernorm"]),
}


def _of_diffusion(make: Callable[[], Any], shape: tuple[int, ...], **more: tuple[int, ...]) -> Callable[[], Run]:
    """A denoiser that learns the noise which a scheduler of diffusers added."""

    def build() -> Run:
        import diffusers

        model = make().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = diffusers.DDPMScheduler(num_train_timesteps=50)

        def step(x: Tensor, extra: dict[str, Tensor]) -> Tensor:
            added = torch.randn_like(x)
            times = torch.randint(0, 50, (len(x),))
            out = model(schedule.add_noise(x, added, times), times, **extra).sample
            loss = F.mse_loss(out, added)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def batch(i: int) -> tuple[Tensor, dict[str, Tensor]]:
            return noise(i, *shape), {name: noise(i + 50, *size) for name, size in more.items()}

        return Run(step, batch, {"model": model, "optimizer": optimizer})

    return build


def _unet() -> Any:
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=8,
    )


def _unet_with_text() -> Any:
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
        layers_per_block=1,
        attention_head_dim=4,
    )


def _autoencoder() -> Run:
    import diffusers

    model = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        posterior = model.encode(x).latent_dist
        loss = F.mse_loss(model.decode(posterior.sample()).sample, x) + 1e-6 * posterior.kl().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Run(step, lambda i: (noise(i, 2, 3, 8, 8),), {"model": model, "optimizer": optimizer})


def _with_average() -> Run:
    import diffusers
    from diffusers.training_utils import EMAModel

    model = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        layers_per_block=1,
    ).train()
    average = EMAModel(model.parameters(), decay=0.99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x, 3).sample, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        return loss

    watch = {"model": model, "average": average.shadow_params, "optimizer": optimizer}
    return Run(step, lambda i: (noise(i, 2, 3, 8, 8),), watch)


DIFFUSERS: dict[str, Callable[[], Run]] = {
    "unet": _of_diffusion(_unet, (2, 3, 8, 8)),
    "unet_with_text": _of_diffusion(_unet_with_text, (2, 4, 8, 8), encoder_hidden_states=(2, 5, 12)),
    "autoencoder_kl": _autoencoder,
    "unet_with_ema_model": _with_average,
}


def accelerated() -> Run:
    """Accelerate in one process: prepare, backward, clipping."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    family = Family("LlamaConfig", "LlamaForCausalLM", text)
    plain = family.build()
    schedule_of = torch.optim.lr_scheduler.CosineAnnealingLR
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, wrapped, schedule = accelerator.prepare(plain, optimizer, schedule_of(optimizer, 20))

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        wrapped.step()
        schedule.step()
        wrapped.zero_grad()
        return loss.detach()

    watch = {"model": model, "optimizer": optimizer}
    return Run(step, lambda i: (text(i, model),), watch)


def fabric() -> Run:
    """Lightning's Fabric in one process."""
    from lightning.fabric import Fabric

    held = Fabric(accelerator="cpu", devices=1)
    plain = Family("GPT2Config", "GPT2LMHeadModel", text).build()
    model, optimizer = held.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        held.backward(loss)
        held.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Run(step, lambda i: (text(i, plain),), {"model": plain, "optimizer": optimizer.optimizer})


def checkpointed() -> Run:
    """Gradient checkpointing of transformers."""
    run = Family("LlamaConfig", "LlamaForCausalLM", text).run()
    run.watch["model"].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    run.watch["model"].config.use_cache = False
    return Run(train, run.arguments, run.watch)


FRAMEWORKS: dict[str, Callable[[], Run]] = {
    "accelerate": accelerated,
    "lightning_fabric": fabric,
    "transformers_checkpointing": checkpointed,
}
