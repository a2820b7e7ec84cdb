"""Keys of verl and what they are called here, for the errors that people meet who bring a script along.

`docs/coming-from-verl.md` shows the same tables; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from ..errors import nearest

# Where two keys end in the same word, the first is taken for that word alone.
VERL_KEYS: dict[str, str] = {
    "data.train_files": "data.sources",
    "data.val_files": "eval.sources",
    "data.train_batch_size": "train.prompts_per_step",
    "data.prompt_key": "data.sources.prompt_column",
    "data.max_response_length": "rollout.sampling.max_response_length",
    "data.filter_overlong_prompts": "data.truncation: drop",
    "data.train_max_samples": "data.sources.limit",
    "data.val_max_samples": "eval.sources.limit",
    "data.apply_chat_template_kwargs": "data.template_kwargs",
    "data.custom_cls.path": "data.sources (type: python)",
    "trainer.total_training_steps": "train.steps",
    "trainer.total_epochs": "train.steps (epochs x rows / prompts_per_step)",
    "trainer.project_name": "tracking.project",
    "trainer.experiment_name": "name",
    "trainer.logger": "tracking.trackers",
    "trainer.rollout_data_dir": "tracking.rollouts_every",
    "trainer.test_freq": "eval.every",
    "trainer.val_before_train": "eval.before_training",
    "trainer.save_freq": "checkpoint.every",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.resume_mode": "checkpoint.resume",
    "trainer.resume_from_path": "checkpoint.resume",
    "trainer.default_local_dir": "output_dir",
    "trainer.critic_warmup": "algorithm.critic_warmup",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
    "algorithm.use_kl_in_reward": "algorithm.kl.where: reward",
    "algorithm.kl_penalty": "algorithm.kl.estimator",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef",
    "algorithm.kl_ctrl.type": "algorithm.kl.controller",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl.horizon",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.importance_cap",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.custom_chat_template": "model.chat_template",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.target_modules",
    "actor_rollout_ref.actor.optim.lr": "train.optimizer.learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "train.optimizer.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "train.optimizer.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "train.optimizer.max_grad_norm",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "train.updates_per_step (prompts_per_step / ppo_mini_batch_size)",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "train.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "train.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_epochs": "train.passes_per_step",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl.where: loss",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl.estimator",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm.policy_loss",
    "actor_rollout_ref.actor.use_torch_compile": "model.compile",
    "actor_rollout_ref.rollout.n": "train.samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "rollout.sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.sampling.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.sampling.top_k (0 keeps all, not -1)",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_concurrent_rows",
    "actor_rollout_ref.rollout.dtype": "model.dtype",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "train.max_tokens_per_microbatch",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "train.max_tokens_per_microbatch",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.samples_per_prompt",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.sampling.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "eval.sampling.top_p",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "eval.sampling.top_k",
    "actor_rollout_ref.rollout.multi_turn.enable": "rollout.program",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "train.max_tokens_per_microbatch",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "train.max_tokens_per_microbatch",
    "critic.optim.lr": "critic.learning_rate",
    "critic.model.path": "critic.path",
    "critic.cliprange_value": "critic.value_clip",
    "critic.ppo_epochs": "critic.passes_per_step",
    "critic.ppo_mini_batch_size": "train.updates_per_step (prompts_per_step / ppo_mini_batch_size)",
    "critic.ppo_micro_batch_size_per_gpu": "train.max_tokens_per_microbatch",
    "critic.ppo_max_token_len_per_gpu": "train.max_tokens_per_microbatch",
    "reward.custom_reward_function.path": "rewards.functions (type: python)",
    "reward.custom_reward_function.name": "rewards.functions (type: python)",
    "reward.reward_model.model.path": "rewards.functions (type: model)",
    "custom_reward_function.path": "rewards.functions (type: python)",
    "custom_reward_function.name": "rewards.functions (type: python)",
    "reward_model.model.path": "rewards.functions (type: model)",
}

# Beginnings of keys that have no counterpart, and why.
VERL_WITHOUT: dict[str, str] = {
    "trainer.nnodes": "a run is one process on one machine",
    "trainer.n_gpus_per_node": "a run uses one GPU, or the CPU (device)",
    "trainer.balance_batch": "one process has nothing to balance",
    "trainer.default_hdfs_dir": "checkpoints lie on the local file system",
    "trainer.val_only": "`surefoot eval` does this",
    "actor_rollout_ref.hybrid_engine": "the actor always samples itself",
    "actor_rollout_ref.model.use_remove_padding": "there is never any padding",
    "actor_rollout_ref.model.use_fused_kernels": "the head is always computed in chunks",
    "actor_rollout_ref.actor.strategy": "one device needs no FSDP or Megatron",
    "actor_rollout_ref.actor.use_dynamic_bsz": "micro-batches are always cut by tokens",
    "actor_rollout_ref.actor.fsdp_config": "one device needs no FSDP, and there is no offloading",
    "actor_rollout_ref.actor.megatron": "one device needs no Megatron",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "one device has nothing to split a sequence over",
    "actor_rollout_ref.rollout.name": "there is one engine, and it is built in",
    "actor_rollout_ref.rollout.mode": "there is one engine, and it is built in",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.max_concurrent_rows bounds the engine's memory",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "the engine runs on one device",
    "actor_rollout_ref.rollout.enforce_eager": "the engine has no such switch",
    "actor_rollout_ref.rollout.free_cache_engine": "the engine's cache is always freed after sampling",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "the engine has no such switch",
    "actor_rollout_ref.rollout.enable_prefix_caching": "samples of one prompt always share it",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "the engine has no such switch",
    "actor_rollout_ref.rollout.max_model_len": "the longest row follows from the two length limits",
    "actor_rollout_ref.rollout.calculate_log_probs": "they are always kept",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": "micro-batches are always cut by tokens",
    "actor_rollout_ref.rollout.checkpoint_engine": "the engine runs the actor's own weights: nothing is synchronised",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "micro-batches are always cut by tokens",
    "actor_rollout_ref.ref.fsdp_config": "one device needs no FSDP, and there is no offloading",
    "critic.enable": "a `critic` section is the switch",
    "critic.strategy": "one device needs no FSDP or Megatron",
    "reward.reward_model.enable": "an entry in rewards.functions is the switch",
    "reward_model.enable": "an entry in rewards.functions is the switch",
    "reward.reward_manager": "rewards.functions is the list of rewards",
    "reward_model.reward_manager": "rewards.functions is the list of rewards",
    "data.image_key": "there are no images",
    "data.return_raw_chat": "rollout programs always get the messages",
    "ray_kwargs": "there is no Ray",
    "ray_init": "there is no Ray",
}

# Sections that verl has and this configuration has not.
_SECTIONS = {"actor_rollout_ref", "trainer", "reward", "reward_model", "custom_reward_function", "ray_kwargs"}

# Last words that say nothing without the rest of the key.
_VAGUE = {"path", "name", "type", "enable", "temperature", "top_p", "top_k", "dtype", "mode", "strategy"}
_BY_LAST_WORD: dict[str, str] = {}
for _key, _here in VERL_KEYS.items():
    if (_word := _key.rpartition(".")[2]) not in _VAGUE:
        _BY_LAST_WORD.setdefault(_word, _here)


def verl_hint(key: str) -> str | None:
    """Return a sentence on a key of verl's, given whole; None when it is none, nor in a section that only verl has."""
    if here := VERL_KEYS.get(key):
        return f"What verl calls `{key}` is `{here}` here."
    for beginning, why in VERL_WITHOUT.items():
        if key == beginning or key.startswith(beginning + "."):
            return f"verl's key has no counterpart: {why}."
    if key.partition(".")[0] not in _SECTIONS:
        return None
    near = nearest(key, (*VERL_KEYS, *VERL_WITHOUT), 0.85)
    return f"Is it verl's `{near}`? {verl_hint(near)}" if near else "The page `Coming from verl` lists what there is."


def verl_hint_by_word(word: str) -> str | None:
    """The same for a key's last word, wherever it was put."""
    here = _BY_LAST_WORD.get(word)
    return f"What verl calls `{word}` is `{here}` here." if here else None


def verl_leaves(key: str, value: object) -> Iterator[str]:
    """Yield the keys below a section of verl's; nothing when `key` starts no key of verl's."""
    if not isinstance(value, Mapping):
        return
    if not any(known.startswith(key + ".") for known in (*VERL_KEYS, *VERL_WITHOUT)):
        return
    for name, entry in cast("Mapping[str, Any]", value).items():
        below = list(verl_leaves(f"{key}.{name}", entry))
        yield from below or [f"{key}.{name}"]
