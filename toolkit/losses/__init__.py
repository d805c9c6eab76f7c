"""The fused distillation loss: two LM heads and their loss, without full logits."""
