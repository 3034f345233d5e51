"""GRPO end to end on the CPU with veRL, Ray and vLLM as they are, a random tiny model and a reward without a server.

A start of veRL takes more than a minute, so three starts carry all of it: the published variants, a kill in the
middle of a step, a checkpoint cut short, the resume, an outage of the reward that is waited for, one that is not,
rollouts that cannot be scored, the weight sync, merging one shard and two.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TOY_REWARD = ROOT / "tests/data/toy_reward.py"
START_TIMEOUT = 900  # seconds; two busy cores
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a random model, converted, and prepared texts."""
    from safetensors.torch import load_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from cosyvoice.llm.to_huggingface import convert

    golden = ROOT / "tests/data/golden"
    folder = tmp_path_factory.mktemp("world")
    source = folder / "cosyvoice2"
    shutil.copytree(golden / "tiny_tokenizer", source / "CosyVoice-BlankEN")
    settings = json.loads((golden / "llm_tiny_config.json").read_text())["qwen2_config"]
    # vLLM's CPU attention has no kernel for the golden model's head size of 8
    settings |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    (source / "CosyVoice-BlankEN" / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(7)
    body = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in settings.items() if k != "model_type"}))
    tensors = {f"llm.model.{name}": value.contiguous() for name, value in body.state_dict().items()}
    tensors["llm.model.lm_head.weight"] = tensors["llm.model.model.embed_tokens.weight"]
    like = load_file(golden / "llm_tiny_weights.safetensors")
    for name, tensor in like.items():
        if not name.startswith("llm.model."):
            tensors[name] = 0.5 * torch.randn(*tensor.shape[:1], *([64] if tensor.dim() == 2 else []))
    torch.save(tensors, source / "llm.pt")
    convert(source, folder / "hf", torch.float32, "speech", progress=False)

    for split, n in (("train", 64), ("test", 4)):
        lines = [json.dumps({"id": f"{split}{i}", "text": f"{split} text number {i}"}) for i in range(n)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    subprocess.run(
        [sys.executable, ROOT / "prepare_data.py", "--train_file", folder / "train.jsonl", "--test_file",
         folder / "test.jsonl", "--local_dir", folder / "data"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (folder / "control").write_text("ok")
    return folder


class Run:
    """``python -m verl.trainer.main_ppo`` with what ``run.sh 2`` gives it, a smaller size and the toy reward."""

    def __init__(self, world: Path, name: str, record_driver, *options: str) -> None:
        self.folder, self.world, self.name = world / name, world, name
        recorded = record_driver(world / f"driver_{name}_{len(list(world.glob('driver_*')))}", *options)
        overrides, environment = recorded["verl.trainer.main_ppo"]
        paths = {"data.train_files": world / "data/train.parquet", "data.val_files": world / "data/test.parquet"}
        paths |= {"actor_rollout_ref.model.path": world / "hf", "trainer.default_local_dir": self.folder}
        paths |= {"trainer.rollout_data_dir": self.folder / "rollouts", "hydra.run.dir": self.folder / "hydra"}
        paths |= {"++trainer.v1.sampler.sampler_kwargs.metrics_file": self.folder / "metrics.jsonl"}
        paths |= {"reward.custom_reward_function.path": TOY_REWARD}
        dropped = ("+reward.custom_reward_function.reward_kwargs", "+ray_kwargs.ray_init._temp_dir")
        self.overrides = [
            f"{key}={paths.get(key, value)}"
            for key, value in (word.split("=", 1) for word in overrides)
            if not key.startswith(dropped)
        ]
        self.overrides += [
            f"+reward.custom_reward_function.reward_kwargs.control={world / 'control'}",
            "+reward.custom_reward_function.reward_kwargs.server=http://toy:1",
            "++reward.prime.retry_s=0.5",
            "++reward.prime.patience_s=25",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
            "data.max_response_length=24",
            "actor_rollout_ref.rollout.max_model_len=88",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.optim.lr=3e-3",
            "trainer.save_freq=2",
            "trainer.test_freq=-1",
        ]
        self.environment = {**os.environ, **environment, "TENSORBOARD_DIR": str(self.folder / "tensorboard")}
        del self.environment["VLLM_RPC_BASE_PATH"]  # a folder that was gone when the driver ended
        self.environment["RAY_raylet_start_wait_time_s"] = "300"
        self.id = f"test.{os.getpid()}.{name}"
        self.log = world / f"{name}.log"

    def preflight(self) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "cosyvoice.training.preflight", *self.overrides],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, cwd=ROOT,
        )  # fmt: skip

    def start(self, *more: str) -> None:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *self.overrides, *more]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, env=self.environment | {"COSYVOICE_RUN_ID": self.id, "SPT_NOENV": "1"}, cwd=ROOT,
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def steps(self) -> list[dict]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not any(line["step"] == step for line in self.steps()):
            assert self.process.poll() is None, f"veRL ended: {self.tail()}"
            assert time.monotonic() < deadline, f"no step {step}: {self.tail()}"
            time.sleep(0.2)

    def wait(self) -> int:
        return self.process.wait(timeout=START_TIMEOUT)

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def logged(self, key: str) -> list[float]:
        """Every value of a metric that veRL wrote to the console."""
        return [float(v) for v in re.findall(rf"{re.escape(key)}:(?:np\.\w+\()?([-\d.e+]+)", self.log.read_text())]

    def processes(self) -> list[int]:
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"COSYVOICE_RUN_ID={self.id}".encode() in file.read_bytes().split(b"\0"):
                    found.append(int(file.parent.name))
            except OSError:  # it ended meanwhile, or is another user's
                continue
        return found

    def end_left_over(self) -> None:
        """What the driver does when it is started again."""
        subprocess.run(["bash", "-c", '. scripts/lib.sh; end_pids_of "$1"', "_", self.id], cwd=ROOT, timeout=60)


@pytest.fixture
def run(world, record_driver):
    """``run(name, *driver options)``; whatever a test leaves running is ended."""
    started = []

    def make(name: str, *options: str) -> Run:
        started.append(Run(world, name, record_driver, "--profile", "tiny", *options))
        return started[-1]

    yield make
    for one in started:
        one.end_left_over()
        assert one.processes() == []


def merged(world: Path, checkpoint: Path) -> Path:
    target = world / "merged" / f"{checkpoint.parent.name}_{checkpoint.name}"
    target.parent.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "cosyvoice.training.merge", "--checkpoint", checkpoint, "--base", world / "hf",
         "--target", target],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "VERL_PLATFORM": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return target


def load(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_kill_resume_outage_and_merge(world, run):
    # --- DAPO, killed in the middle of step 4, with answers that cannot be scored ------------------------------
    (world / "control").write_text("picky")
    first = run("killed", "--algorithm", "dapo")
    assert first.preflight().returncode == 0
    first.start("trainer.total_training_steps=50", "actor_rollout_ref.rollout.n=6")
    first.wait_for_step(4)  # its line is written before its update
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(timeout=30)
    steps = {line["step"]: line for line in first.steps()}
    assert sorted(steps) == [1, 2, 3, 4]
    assert sum(line["reward/failed/bad_reference"] for line in steps.values() if line["reward/failed"]) > 0
    assert all(line["reward/n"] <= 4 * 6 for line in steps.values())
    assert any(line["reward/shaped_score/mean"] < line["reward/score/mean"] for line in steps.values())
    assert all(0 <= line["reward/non_stop_share"] <= 1 for line in steps.values())
    # rollouts come from the weights that are trained, after updates too (both compute in float32)
    assert len(first.logged("training/rollout_probs_diff_max")) >= 3
    assert max(first.logged("training/rollout_probs_diff_max")) < 1e-4
    first.end_left_over()
    assert first.processes() == []
    assert list(first.folder.glob("tensorboard/events.*"))

    # --- what was saved last is cut short: skipped; other data: refused ----------------------------------------
    broken = first.folder / "global_step_4"
    if not broken.exists():
        shutil.copytree(first.folder / "global_step_2", broken)
    shard = broken / "actor/model_world_size_1_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[:1000])
    (first.folder / "latest_checkpointed_iteration.txt").write_text("4")
    data = world / "data/train.parquet"
    kept = data.read_bytes()
    shutil.copy(world / "data/test.parquet", data)
    refused = first.preflight()
    assert refused.returncode == 1
    assert "data/train.parquet" in refused.stdout
    data.write_bytes(kept)
    checked = first.preflight()
    assert checked.returncode == 0
    assert "global_step_4 is not complete" in checked.stdout
    assert "goes on from" in checked.stdout
    assert "global_step_2" in checked.stdout

    # --- GSPO goes on from step 2; the reward is away for a while, then for good --------------------------------
    (world / "control").write_text("ok")
    second = run("killed", "--algorithm", "gspo")
    second.log = world / "resumed.log"
    second.start("trainer.total_training_steps=50")
    second.wait_for_step(3)
    (world / "control").write_text("away")
    stalled = max(line["step"] for line in second.steps())
    time.sleep(8)
    assert max(line["step"] for line in second.steps()) <= stalled + 1
    assert second.process.poll() is None
    (world / "control").write_text("ok")
    second.wait_for_step(stalled + 4)
    assert [line["step"] for line in second.steps()] == list(range(1, len(second.steps()) + 1))
    resumed = second.steps()[2:]
    assert sum(line["reward/failed"] for line in resumed) == 0
    assert all(line["reward/n"] == 16 for line in resumed)
    (world / "control").write_text("away")
    assert second.wait() != 0
    words = second.log.read_text()
    assert "the reward cannot be computed: compute_score(" in words
    assert "server=http://toy:1" in words
    assert "http://toy:1: connection refused" in words
    assert max(second.logged("training/rollout_probs_diff_max")) < 1e-4
    second.end_left_over()
    assert second.processes() == []
    (world / "control").write_text("ok")

    # --- merging ------------------------------------------------------------------------------------------------
    last = int((second.folder / "latest_checkpointed_iteration.txt").read_text())
    assert last >= 4
    target = merged(world, second.folder / f"global_step_{last}")
    base, trained = load(world / "hf"), load(target)
    assert base.keys() == trained.keys()
    assert all(trained[name].dtype == torch.float32 for name in trained)
    moved = (trained["lm_head.bias"] - base["lm_head.bias"]).abs().max()
    assert moved > 1e-3
    again = subprocess.run(
        [sys.executable, "-m", "cosyvoice.training.merge", "--checkpoint", second.folder / f"global_step_{last}",
         "--base", world / "hf", "--target", target],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert again.returncode == 1
    assert "is there already" in again.stdout
    exported = subprocess.run(
        [sys.executable, ROOT / "huggingface_to_pretrained.py", "--hf-cosyvoice2-llm-path", target,
         "--output-path", world / "llm.pt"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert exported.returncode == 0, exported.stdout


def test_two_ranks_dr_grpo_with_several_rewards(world, run):
    """Two training processes (gloo) with a vLLM each; Dr. GRPO through our estimator with two reward components."""
    (world / "control").write_text("ok")
    two = run("two_ranks", "--algorithm", "dr_grpo", "--n-gpus", "2")
    two.start(
        "trainer.total_training_steps=2",
        "ray_kwargs.ray_init.num_gpus=2",
        "algorithm.adv_estimator=multi_reward_grpo",
        "++algorithm.multi_reward.weights={score:1.0,brevity:0.5}",
        "++trainer.v1.sampler.sampler_kwargs.reward_keys=[score,brevity]",
    )
    assert two.wait() == 0, two.tail()
    assert [line["step"] for line in two.steps()] == [1, 2]
    assert max(two.logged("training/rollout_probs_diff_max")) < 1e-4
    two.end_left_over()
    shards = sorted(path.name for path in (two.folder / "global_step_2/actor").glob("model_*"))
    assert shards == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]
    trained, base = load(merged(world, two.folder / "global_step_2")), load(world / "hf")
    assert (trained["lm_head.bias"] - base["lm_head.bias"]).abs().max() > 1e-3
    one = run("two_ranks", "--algorithm", "dr_grpo")
    refused = one.preflight()
    assert refused.returncode == 1
    assert "written by 2 training processes, found 1" in refused.stdout
