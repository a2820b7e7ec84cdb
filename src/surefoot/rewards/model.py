"""A Hugging Face sequence-classification model as reward, batched, in the controller process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.rewards import ModelReward
from ..errors import UserError
from ..plugins import describe_failure
from .api import Outcome, RewardItem

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel:
    """The model on its device. A conversation's score is the first logit at its last token."""

    def __init__(self, spec: ModelReward, key: str, device: str) -> None:
        """Load the model. `key` is the reward's place in the configuration, for errors.

        Raises:
            UserError: It cannot be loaded, it has no trained score head, or its tokenizer no chat template.
        """
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._batch_size = spec.batch_size
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(spec.path)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                spec.path, dtype=getattr(torch, spec.dtype), output_loading_info=True
            )
        except Exception as error:
            raise UserError(
                "reward-model", f"cannot be loaded: {describe_failure(error)}", key=f"{key}.path", got=spec.path
            ) from error
        if missing := sorted(info["missing_keys"]):
            raise _headless(spec, key, ", ".join(missing))
        if not self._tokenizer.chat_template:
            raise _templateless(spec, key)
        self._model: PreTrainedModel = model.to(device).eval()
        self._longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def score(self, items: list[RewardItem]) -> list[Outcome]:
        """Return one outcome per item: an error where the template refuses or the context cannot hold it."""
        outcomes: list[Outcome | None] = [None] * len(items)
        rows: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            try:
                rows[index] = self._encode(item)
            except Exception as error:  # Templates raise whatever their authors liked.
                outcomes[index] = Outcome(error=describe_failure(error))
        # Rows of like length share a batch, so that little of it is filling.
        order = sorted(rows, key=lambda index: len(rows[index]))
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            for index, value in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                outcomes[index] = Outcome(value)
        return [outcome or Outcome(error="not judged") for outcome in outcomes]

    def _encode(self, item: RewardItem) -> list[int]:
        messages = item.messages or ({"role": "user", "content": item.prompt},)
        conversation = [*map(dict, messages), {"role": "assistant", "content": item.response}]
        text: Any = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        # The template writes the special tokens itself: adding them again would double the first.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._longest is not None and len(ids) > self._longest:
            raise ValueError(f"the conversation has {len(ids)} tokens, and the reward model takes {self._longest}")
        return ids

    def _forward(self, rows: list[list[int]]) -> list[float]:
        import torch

        # The classification heads of transformers score the last token that is not `pad_token_id`. With pad = eos
        # that is never a final eos, so the filling is an id that stands in no row of the batch. One row has none.
        used = set[int]().union(*rows)
        vocabulary = self._model.config.get_text_config().vocab_size
        filling = next((i for i in range(vocabulary) if i not in used), None) if len(rows) > 1 else None
        if filling is None and len(rows) > 1:
            return [value for row in rows for value in self._forward([row])]
        width = max(map(len, rows))
        ids = torch.tensor([row + [filling or 0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        self._model.config.get_text_config().pad_token_id = filling
        device = self._model.device
        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits[:, 0].float().tolist()


def check_model(spec: ModelReward, key: str) -> None:
    """Refuse, from a folder's files alone, what `RewardModel` would refuse after loading. Hub ids are not looked up.

    Raises:
        UserError: As `RewardModel`.
    """
    folder = Path(spec.path).expanduser()
    if not folder.is_dir():
        if spec.path.startswith((".", "/", "~")) or spec.path.count("/") != 1:
            raise UserError("reward-model", "there is no such folder", key=f"{key}.path", got=spec.path)
        return
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            "reward-model", f"the folder has no readable config.json: {error}", key=f"{key}.path", got=spec.path
        ) from None
    kinds = config.get("architectures") or []
    if not any("SequenceClassification" in kind for kind in kinds):
        raise _headless(spec, key, f"its architecture is {', '.join(kinds) or 'not named'}")
    tokenizer = folder / "tokenizer_config.json"
    inline = tokenizer.is_file() and json.loads(tokenizer.read_text()).get("chat_template")
    if (
        not inline
        and not (folder / "chat_template.jinja").is_file()
        and not (folder / "additional_chat_templates").is_dir()
    ):
        raise _templateless(spec, key)


def _headless(spec: ModelReward, key: str, found: str) -> UserError:
    want = "a sequence-classification model, trained as a reward model"
    return UserError(
        "reward-model", f"it has no trained score head ({found})", key=f"{key}.path", got=spec.path, want=want
    )


def _templateless(spec: ModelReward, key: str) -> UserError:
    hint = "Put the template that it was trained with into the folder as chat_template.jinja."
    return UserError("reward-model", "its tokenizer has no chat template", key=f"{key}.path", got=spec.path, hint=hint)
