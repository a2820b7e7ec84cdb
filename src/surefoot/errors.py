"""The one tree of errors, and what each code means.

Every error that a user can see carries a code; `surefoot explain CODE` prints the text kept here. The
classes keep their arguments in `args`, so they cross process borders by pickle unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CODES: dict[str, str] = {
    "config-unknown-key": "The file or an override names a key that no section has. Nothing ignores a key: a typing mistake would train another run than the one you meant.",
    "config-bad-value": "A key has a value of the wrong type or out of its range.",
    "config-file": "The configuration file cannot be read as YAML.",
    "config-conflict": "Two keys contradict each other; both are named in the message.",
    "algorithm-unknown": "The name is in no table of algorithms, advantage estimators or policy losses. `surefoot algorithms` lists them all.",
    "algorithm-key-ignored": "A key has a value, and the algorithm that the configuration describes would never read it. It is refused because a run that ignores a key is another run than the one you meant. Take the key out, or choose the algorithm or the switch that reads it; the message names which.",
    "group-of-one": "The algorithm's advantage is a sample's score minus the mean of its group, the samples of the same prompt. With one sample a prompt that difference is always 0: the run would work, plot curves and learn nothing. Raise `train.samples_per_prompt`, or take an algorithm without a group.",
    "critic-missing": "The advantage estimator needs a value model. Add a `critic` section (an empty one takes the defaults), or take an estimator without a critic.",
    "critic-unused": "There is a critic, or a warm-up for one, and the advantage estimator reads no values. A critic doubles the memory and the training time, so it is not trained for nothing: take it out, or take `advantage: gae`.",
    "critic-not-ready": "`critic_warmup: auto` waited its longest and the critic still does not predict the returns of fresh rollouts, so its advantages would be noise. Usual causes: a learning rate too low for a new value head, rewards that are all equal, or too few rollouts a step. The actor's weights have not been touched.",
    "kl-estimator-place": "A KL estimate works through its gradient, and that depends on where it is used (arXiv:2510.01555). In the reward only k1 has the KL's gradient; that of k3 and k2 vanishes near the reference, so they would hold nothing back. In the loss k2 and k3 pull towards the reference, and k1's gradient is zero on average. The logged KL would look right in every case, which is why this is refused.",
    "loss-not-finite": "A number that the loss reads is NaN or infinite. The update was not made: one such number makes every weight NaN. The message names the column, row and token. A log-probability that is not finite usually means that the weights already diverged (lower the learning rate), or float16 overflow; a value or return, that the critic did.",
    "plugin-not-found": "A key names a function of yours, and there is no such file, module or name. Write `package.module:function` or `path/to/file.py:function`; paths are relative to the working directory.",
    "plugin-broken": "The file or module that holds your function raises while it is imported, or the name in it is no function. Import it in a Python shell to see the whole traceback.",
    "model-unsupported": "The architecture needs a term that Surefoot's trainer does not compute. Training it anyway would give silently wrong log-probabilities, so it is refused.",
    "model-load": "transformers or PEFT could not load the model or its adapter from what the configuration names.",
    "disk-full": "A file that the run can't do without (metrics, a checkpoint, an export) did not fit on its disk. The message says which file and how much is free. The newest whole checkpoint is untouched: free some space, or lower `checkpoint.keep_last` or `tracking.rollouts_every`, and start the same command again.",
    "run-folder-locked": "Another process is writing to this run folder. Two runs in one folder would mix their metrics and overwrite each other's checkpoints. Wait for it, stop it, or give this run another `name`.",
    "run-folder-unwritable": "The run folder can't be created or written to. Choose another `output_dir`.",
    "stalled": "For `stall_limit` seconds nothing happened: no rollout was done and no micro-batch computed. What is printed before names the phase, the requests that are not answered, and where each process is. The usual causes are a rollout program that waits for a server without a time limit, a network between nodes that lets connections open and no data through (see NCCL_SOCKET_IFNAME), and a phase that may really take so long: then raise `stall_limit`. The state of the last whole step is saved, unless the stall was amid an update.",
    "metrics-unreadable": "`metrics.jsonl` of the run folder has a line that is no step of a run: something else wrote there, or it was edited. Going on would lose it or mix it in, so nothing is touched. Mend or move the file, or give this run another `name`.",
    "tracker-missing-package": "A tracker named in `tracking.trackers` needs a package that isn't installed. Install the extra that the message names, or take the tracker out of the list.",
    "tracker-start": "A tracker could not start (no login, no network, wrong project). The run stops here, before anything was computed, so that you don't find an empty dashboard tomorrow. A tracker that fails later never stops a run.",
    "checkpoint-not-found": "`checkpoint.resume`, or the path given to a command, names no checkpoint and no run folder with one.",
    "checkpoint-none-whole": "Checkpoint folders are there, but none is whole: each lacks its manifest or some of its files. Starting again at step 0 would hide that, so it is refused. Delete the folders to start from the beginning.",
    "checkpoint-corrupt": "A checkpoint's file differs from what its manifest says was written (size or digest). With `checkpoint.resume: auto` a run goes on from the newest one that is not damaged; a damaged one of its own is renamed, and kept for you to look at.",
    "checkpoint-mismatch": "The checkpoint's tensors don't fit the model that the configuration describes: other names or shapes. It was made by another `model` section.",
    "resume-used-folder": "`checkpoint.resume: never` was asked for, and the run folder already holds a run. Give this run another `name`, or move the folder away.",
    "resume-newer-exists": "`checkpoint.resume` names a checkpoint, and the run folder holds others that did not come before it. Going on would leave two histories in one folder, and the next automatic resume could take the wrong one. Use `checkpoint.resume=auto`, or another `name`.",
    "export-target": "The folder to export to already holds something, and nothing is overwritten. Choose a new folder.",
    "export-keys": "The exported folder does not hold exactly the tensors that its architecture asks for, so loading it would leave weights random. Nothing was left behind at the target.",
    "reward-model": "The reward model named in `rewards.functions` cannot be used: not found, not loadable, without a trained score head (its scores would be random numbers), or without a chat template in its tokenizer (it would judge text of another form than it was trained on).",
    "reward-package": "A reward needs a package that isn't installed. Install it, or take the reward out of `rewards.functions`.",
    "reward-sandbox": "The `code` reward runs programs that the model wrote, and this machine can't shut them in: that takes Linux on x86_64 or aarch64 with seccomp filters. Running them without is refused. Train elsewhere, or judge with a function of your own.",
    "reward-worker": "The processes that compute rewards can't start or were closed. The message holds what the process said: usually a module that loads in the main process and not in a fresh one. Try `rewards.workers=0` to see the failure in a debugger.",
    "alarm-nothing-to-learn": "All rewards within each group are equal, or nearly all responses are cut at the length limit, for several steps: every advantage is zero, so no weight moves. Raise `rollout.sampling.max_response_length` if responses are cut; otherwise take easier (or harder) data, or check that the reward can tell good from bad.",
    "alarm-entropy-collapse": "The policy's entropy is nearly zero: all samples of a prompt are the same, so there is nothing to compare. If the reward is where you want it, stop here. If not: lower `train.optimizer.learning_rate`, add a little `algorithm.entropy_coef`, or raise `algorithm.clip_high`.",
    "alarm-entropy-explosion": "The policy's entropy has grown to a multiple of its start: it is drifting to noise. Lower `train.optimizer.learning_rate`, set `algorithm.entropy_coef` to 0, or hold it to the reference with `algorithm.kl`.",
    "alarm-nan": "A loss, gradient or reward is NaN or infinite. The update that it belongs to was skipped, so it has not spoilt the weights itself; but what made it often has: a learning rate too high. The state saved at the stop holds these weights. Look at the last steps in metrics.jsonl; delete the checkpoint folders made since the numbers went wrong, and start the same command again with a lower `train.optimizer.learning_rate`, or with `model.dtype: float32`.",
    "alarm-first-ratio": "At the first update of a step the policy is the one that sampled, so the ratio must be 1. It is not: log-probabilities of the two passes differ (dropout, precision, or a defect).",
    "alarm-engine-gap": "The sampling engine and the trainer disagree about the log-probabilities of the same tokens. Either `top_p`, `top_k` or `min_p` of `rollout.sampling` filter what is sampled, which the trainer's log-probabilities do not know of, or their arithmetic differs a lot (use `model.dtype: float32` to see), or the engine does not run the weights that were trained.",
    "alarm-length-runaway": "Responses have grown to a multiple of their first length while the held-out score falls: the reward is being gamed by length. Look at the rollouts; add a `length` reward or lower `rollout.sampling.max_response_length`.",
    "alarm-critic": "After its warm-up the critic predicts worse than the constant mean would: advantages are noise. Give it a longer `algorithm.critic_warmup` (or `auto`), or another `critic.learning_rate`.",
    "alarm-critic-worse": "The critic explained the returns and no longer does: it can't follow the policy. Raise `critic.learning_rate` or `critic.passes_per_step`, or lower the actor's learning rate.",
    "alarm-kl": "The policy is very far from the reference. Raise `algorithm.kl.coef`, or lower the learning rate.",
    "alarm-throughput": "Tokens per second fell far below the run's own best: another process on the machine, memory swapping, a slow disk or a throttled device.",
    "alarm-disk-full": "A rollout file did not fit on the disk. Rollout files are for looking at, so training goes on without them; metrics and checkpoints are not so lucky: free some space, or set `tracking.rollouts_every: 0`.",
    "model-not-found": "model.path (or another key that names a model) is neither a folder, nor a model of the hub that can be reached, nor a model that comes with a package. Check the spelling; without a network, download the model first and name its folder.",
    "model-unusable": "There is something at the model's path, and it cannot be used: a folder without config.json or tokenizer, a single file, LoRA adapters without their base. It is refused before any weights are loaded.",
    "data-missing": "A file, folder, dataset, split or task that a source names does not exist or cannot be reached. Paths are relative to the working directory; several files are a list or a glob.",
    "data-unreadable": "A file is not what its name says, or its rows are no mappings of columns to values. The message names the file and the line.",
    "data-empty": "A source has no rows. A run over nothing would look like a run that learns nothing, so it is refused.",
    "data-column": "Rows have no column for the prompt, or none for the answer that a reward of this run compares with. Set prompt_column or answer_column of the source; `a.b` reaches into a nested column. A missing answer would score 0 for the whole run without a word.",
    "data-prompt": "A prompt is empty or has a shape that cannot be rendered. A prompt is text, or a list of messages with `role` and text as `content`, the last one not the assistant's. The message names the row.",
    "data-template": "The chat template cannot render the prompts: the model has none, the file is no Jinja, or it refuses the messages (some templates want user and assistant to alternate, or take no system message).",
    "data-too-long": "Prompts are longer than data.max_prompt_length, counted in tokens with all that the chat template adds: system prompt, tool schemas, generation prompt. Under `truncation: error` nothing is dropped or cut without your word. `surefoot data` shows the lengths.",
    "data-too-few": "A step asks for more different prompts than a source has. No step holds a prompt twice, since two groups of one prompt would be taken for one.",
    "data-changed": "A checkpoint remembers its place in the data. With other rows, weights, seed or order that place is another one, and rows would be skipped or repeated in silence, so the run does not go on.",
    "no-such-code": "`surefoot explain` knows the codes that stand in brackets at the end of errors and in front of alarms.",
    "no-gpu": "The configuration asks for a GPU and PyTorch sees none: no device, no driver, or a PyTorch built for the CPU only. `nvidia-smi` shows the first two, `python -c 'import torch; print(torch.version.cuda)'` the third.",
    "gpu-too-small": "Training and sampling share a GPU, and what was measured or computed of them is more than it has. Training's part is its peak on the longest rows that this configuration allows, seen in a rehearsal; the sampler's is its weights, its working memory and the KV cache. The message has the numbers and what would make room.",
    "cluster-unreachable": "No Ray cluster answers at `placement.address`, or none could be started on this machine. `ray status` on its head node says whether it runs; `ray://` addresses need Ray's client server, port 10001.",
    "cluster-too-small": "The placement asks for more than the cluster has, or than others leave free. The message has what is wanted, what there is, what is free and who holds the rest.",
    "worker-failed": "A process of the run raised an error of its own. The message has its name, the error and the last lines of its log; the whole log is in the run's `logs` folder.",
    "worker-died": "A process of the run ended without a word: killed by the system for its memory, by a fault of the GPU, or by hand. The others were ended too, since they would wait for it for ever. The state of the last whole step is saved; the same command goes on from it.",
    "engine-missing": "The sampling engine that the configuration names is an extra that is not installed here.",
    "engine-start": "The sampling engine did not come up. The message has its first words; its log, in the run's `logs` folder, has the rest. A setting that it refuses stands under `rollout.engine`, most of them under `engine_args`.",
    "engine-died": "The sampling engine ended or failed in the middle of the run: out of memory, a lost GPU, a fault of its own. The state of the last whole step is saved; the same command goes on from it.",
    "weights-not-delivered": "After a sync each tensor is compared with what the trainer sent, by a fingerprint. One did not arrive as it was: sampling would have gone on with other weights than were trained, without any sign of it. The run stops instead, and says which tensor it was.",
    "engine-trainer-gap": "Engine and trainer say different log-probabilities for the same tokens under the same weights. Small differences come from arithmetic in half precision; this one is larger than `rollout.engine.probe_tolerance`. The usual causes are weights that did not arrive, a tied output head that was left behind, and an engine setting that changes the model.",
    "rollout-request": "The sampling engine refuses a request; the message has its reason. It came from a rollout program or from sampling settings that this engine does not have.",
    "rollout-program-failed": "The function in `rollout.program` raised on every prompt of a step, so there is nothing to train on. A program that raises on some prompts costs only those; they are counted as `rollout/failed_prompts`.",
    "alarm-stop": "An alarm that `alarms.stop_on` lists went off. The state of the last step is saved: look at metrics.jsonl and the step's rollouts, mend the cause, and start the same command again, or take the alarm out of `alarms.stop_on`.",
    "rollout-request-id": "Two open requests carry the same id, so their completions could not be told apart. A rollout program that goes through `RolloutBuilder` cannot make this mistake.",
    "rollout-empty-prompt": "A request has no prompt tokens, so there is nothing to continue. An empty row of the data is refused earlier; this one came from a rollout program.",
    "rollout-too-long": "Prompt and response together would pass the positions that the model was built for; beyond them its output is noise. Lower `data.max_prompt_length` or `rollout.sampling.max_response_length`. For models whose rotary positions change with the batch's longest row the limit is the length up to which they don't.",
    "rollout-not-finite": "The policy's logits are NaN or infinite: its weights are broken, and sampling from them would fill the run with garbage. Resume from the last checkpoint with a lower `train.optimizer.learning_rate`, or with `model.dtype: float32`.",
    "rollout-program": "`rollout.program` names a function that cannot serve as a rollout program. It must be `async def program(prompt, engine, context, **params)` and return a list of rollouts; `rollout.program_params` are its keyword arguments.",
}


def nearest(word: str, known: Iterable[str], likeness: float = 0.5) -> str | None:
    """Return the entry of `known` that looks most like `word`, or None when nothing is near (1 is equal)."""
    matches = get_close_matches(word, list(known), n=1, cutoff=likeness)
    return matches[0] if matches else None


class SurefootError(Exception):
    """Base of every error that Surefoot raises on purpose.

    Args:
        code: A key of `CODES`.
        message: One sentence: what is wrong.
        key: The configuration key, column or option it is about.
        got: What was found.
        want: What is accepted.
        hint: The nearest right thing, or the next step.
    """

    def __init__(
        self,
        code: str,
        message: str,
        key: str | None = None,
        got: object = None,
        want: object = None,
        hint: str | None = None,
    ) -> None:
        assert code in CODES, f"error code {code!r} is not explained in errors.CODES"
        got, want = (None if v is None else str(v) for v in (got, want))
        super().__init__(code, message, key, got, want, hint)
        self.code, self.message, self.key, self.got, self.want, self.hint = code, message, key, got, want, hint

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.message}" if self.key else self.message]
        lines += [
            f"  {label}: {value}" for label, value in (("got", self.got), ("want", self.want)) if value is not None
        ]
        if self.hint:
            lines.append(f"  {self.hint}")
        lines.append(f"  [{self.code}: `surefoot explain {self.code}` says more]")
        return "\n".join(lines)


class UserError(SurefootError, ValueError):
    """A mistake that the user can mend: config, data, files. Exit code 2."""


class RunError(SurefootError, RuntimeError):
    """The run itself failed after it had started properly. Exit code 3."""
