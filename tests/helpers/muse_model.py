"""The text part of Muse Glimmer as a model of its own, which transformers has with vision alone."""

from typing import Any

import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerPreTrainedModel,
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
)


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel):
    """Layers of transformers with the head of MuseGlimmerForConditionalGeneration."""

    config_class = MuseGlimmerTextConfig

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any, **options: Any) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model(input_ids=input_ids, **options).last_hidden_state)
        cap = self.config.final_logit_softcapping
        return CausalLMOutputWithPast(logits=cap * torch.tanh(logits * self.config.output_multiplier / cap))


def register() -> None:
    """Give transformers the class."""
    transformers.AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
