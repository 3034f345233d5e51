"""run.sh with a stand-in for Python that records its arguments and leaves the files that a stage should leave."""

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

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "pretrained_to_huggingface.py", "prepare_data.py", "token2wav_asr_server.py", "reward_tts.py",
    "cosyvoice/training/merge.py", "infer_dataset.py", "huggingface_to_pretrained.py", "scripts/split_jsonl.py",
    "scripts/offline-decode-files.py",
)  # fmt: skip

# What the stand-in does after noting its arguments: the files that the real script would write.
FAKE_PYTHON = f"""#!{sys.executable} -S
import json, os, pathlib, signal, subprocess, sys, time
args = [os.path.normpath(sys.argv[1]), *sys.argv[2:]]
with open(os.environ["CALLS"], "a") as calls:
    env = {{k: v for k, v in os.environ.items() if k.startswith(("VERL", "TENSORBOARD", "COSYVOICE"))}}
    calls.write(json.dumps({{"python": sys.argv[0], "args": args, "env": env}}) + "\\n")
what = args[1] if args[0] == "-m" else args[0]
def option(name):
    return pathlib.Path(args[args.index(name) + 1])
def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
if what == os.environ.get("FAIL"):
    sys.exit(7)
if what == os.environ.get("HANG"):
    # a grandchild in a session of its own, as Ray and vLLM start them
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    pathlib.Path(os.environ["CALLS"] + ".hanging").touch()
    time.sleep(60)
if what == "token2wav_asr_server.py":
    def stop(*_):
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(json.dumps({{"python": "", "args": ["server stopped"], "env": {{}}}}) + "\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    pathlib.Path(os.environ["CALLS"] + ".serving").touch()
    print("serving", flush=True)
    time.sleep(60)
elif what == "reward_tts.py" and option("--wait").name == "900":  # stage 1's check: the server answers when it is up
    serving, deadline = pathlib.Path(os.environ["CALLS"] + ".serving"), time.monotonic() + 10
    while not serving.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
elif what == "pretrained_to_huggingface.py":
    touch(option("--save-path") / "config.json")
elif what == "prepare_data.py":
    touch(option("--local_dir") / "train.parquet"), touch(option("--local_dir") / "test.parquet")
elif what == "verl.trainer.main_ppo":
    values = dict(a.split("=", 1) for a in args[2:])
    train = pathlib.Path(values["trainer.default_local_dir"])
    for step in (10, 20):
        touch(train / f"global_step_{{step}}/actor/model_world_size_1_rank_0.pt")
        touch(train / f"global_step_{{step}}/actor/huggingface/config.json")
    (train / "latest_checkpointed_iteration.txt").write_text("20")
elif what == "cosyvoice.training.merge":
    touch(option("--target") / "config.json")
elif what == "scripts/offline-decode-files.py":
    touch(pathlib.Path(args[1]) / pathlib.Path(args[2]).stem / "summary.json")
elif what == "huggingface_to_pretrained.py":
    touch(option("--output-path"))
"""


class Recipe:
    """A copy of the driver in a folder of its own, with the stand-in for both interpreters."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder, folder / "calls.jsonl"
        shutil.copy(ROOT / "run.sh", folder)
        shutil.copytree(ROOT / "conf", folder / "conf")
        (folder / "scripts").mkdir()
        for script in (ROOT / "scripts").glob("*.sh"):
            shutil.copy(script, folder / "scripts")
        for script in SCRIPTS:
            self.write(script)
        for name in ("train", "reward"):
            self.write(f".venv/{name}/bin/python", FAKE_PYTHON).chmod(0o755)
        for name in (
            "llm.pt",
            "CosyVoice-BlankEN/config.json",
            "data/train.jsonl",
            "data/dev.jsonl",
            "data/test.jsonl",
        ):
            self.write(f"assets/cosyvoice2-tiny/{name}")
        self.write("assets/cosyvoice2-tiny/prompts/prompts.jsonl")

    def write(self, name: str, content: str = "x") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def env(self, **extra: str) -> dict[str, str]:
        # nvidia-smi hidden: the tests mean the same on a machine with GPUs
        return {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "CALLS": str(self.calls_file), **extra}

    def start(self, *args: object, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", "run.sh", *map(str, args)], cwd=self.folder, env=self.env(**env), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, *args: object, **env: str) -> tuple[int, str]:
        process = self.start(*args, **env)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def calls(self) -> list[list[str]]:
        return [call["args"] for call in self.records()]

    def records(self) -> list[dict]:
        if not self.calls_file.exists():
            return []
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    def training(self) -> dict:
        """The last call of veRL's trainer."""
        return [record for record in self.records() if "verl.trainer.main_ppo" in record["args"]][-1]

    def names(self) -> list[str]:
        return [args[1] if args[0] == "-m" else args[0] for args in self.calls()]

    def left_over(self) -> list[str]:
        """Processes whose environment names this recipe."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"CALLS={self.calls_file}".encode() in path.read_bytes().split(b"\0"):
                    found.append(path.parent.name)
            except OSError:  # it ended meanwhile, or is another user's
                continue
        return found


@pytest.fixture
def recipe(tmp_path):
    recipe = Recipe(tmp_path)
    yield recipe
    for pid in recipe.left_over():
        os.kill(int(pid), signal.SIGKILL)


def overrides(args: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in args[2:])


def test_without_arguments_it_prints_help_and_does_nothing(recipe):
    for args in ((), ("--help",), ("0", "2", "-h")):
        status, output = recipe.run(*args)
        assert status == 0
        assert "usage: bash run.sh START [STOP]" in output
        assert re.search(r"--http-port .*\[8000\]", output)
    assert recipe.calls() == []
    assert not (recipe.folder / "exp").exists()


@pytest.mark.parametrize(
    ("args", "words", "expected"),
    [
        (["0", "--no-such-option", "1"], "unknown option --no-such-option", 2),
        (["0", "--n_gpus", "1"], "unknown option --n_gpus", 2),
        (["0", "--path", "1"], "unknown option --path", 2),
        (["0", "-x"], "unknown option -x", 2),
        (["0", "--name"], "option --name needs a value", 2),
        (["6"], "stage 6: expected a number from -2 to 5", 1),
        (["-3", "1"], "stage -3: expected a number from -2 to 5", 1),
        (["2", "1"], "START 2 is behind STOP 1", 1),
        (["0", "1", "2"], "expected START and STOP, found: 0 1 2", 1),
        (["--name", "a"], "which stages?", 1),
        (["0", "--profile", "big"], "conf/big.sh is not there; --profile is one of: 8gpu tiny", 1),
        (["2", "--algorithm", "ppo"], "conf/algorithms/ppo.sh is not there", 1),
        (["2", "--profile", "8gpu"], "profile 8gpu needs a GPU", 1),
        (["-2", "5", "--profile", "8gpu", "--n-gpus", "8"], "the reward server needs voices: --prompts", 1),
        (["3", "--step", "last"], "--step last: expected a number, latest or all", 1),
    ],
)
def test_wrong_command_line_is_one_sentence_and_nothing_runs(recipe, args, words, expected):
    status, output = recipe.run(*args)
    assert (status, recipe.calls()) == (expected, [])
    assert words in output
    assert len(output.strip().splitlines()) == 1


def test_everything_in_order_with_the_server_up_only_while_it_is_needed(recipe):
    recipe.write("scripts/setup.sh", 'exec .venv/train/bin/python setup "$@"\n')
    status, output = recipe.run(-2, 5)
    assert status == 0, output
    names = recipe.names()
    # server and check start together; the rest is in order
    assert sorted(names[3:5]) == ["reward_tts.py", "token2wav_asr_server.py"]
    assert names[:3] == ["setup", "pretrained_to_huggingface.py", "prepare_data.py"]
    assert names[5:] == [
        "cosyvoice.training.preflight",
        "verl.trainer.main_ppo",
        "server stopped",
        "cosyvoice.training.merge",
        *["infer_dataset.py", "scripts/offline-decode-files.py"] * 2,
        "cosyvoice.evaluation.compare",
        *["infer_dataset.py", "scripts/offline-decode-files.py"] * 2,  # greedy
        "cosyvoice.evaluation.compare",
        "cosyvoice.evaluation.report",
        "huggingface_to_pretrained.py",
        "scripts/check_export.py",
    ]
    assert recipe.left_over() == []
    assert not list((recipe.folder / "exp/tiny/.run").iterdir())


def test_argument_vectors_outside_training(recipe):
    tiny = "assets/cosyvoice2-tiny"
    recipe.write("scripts/setup.sh", 'exec .venv/train/bin/python setup "$@"\n')
    assert recipe.run(-2, 5, "--http-port", 9000, "--grpc-port=9001", "--metrics-port", 9002)[0] == 0
    calls = {}
    for args in recipe.calls():
        calls.setdefault(args[1] if args[0] == "-m" else args[0], []).append(args)
    expected = {
        "setup": "setup --profile tiny",
        "pretrained_to_huggingface.py": f"pretrained_to_huggingface.py --pretrained-cosyvoice2-path {tiny} "
        "--save-path exp/tiny/hf --dtype float32",
        "prepare_data.py": f"prepare_data.py --train_file {tiny}/data/train.jsonl --test_file {tiny}/data/dev.jsonl "
        "--local_dir exp/tiny/data --on_bad_row error",
        "token2wav_asr_server.py": f"token2wav_asr_server.py --model-dir {tiny} --asr-model {tiny}/sensevoice "
        f"--prompts {tiny}/prompts/prompts.jsonl --number-of-devices 1 --number-of-instances-per-device 2 "
        "--host 127.0.0.1 --http-port 9000 --grpc-port 9001 --metrics-port 9002",
        "reward_tts.py": "reward_tts.py --check --urls http://127.0.0.1:9000 --wait 900",
        "cosyvoice.training.merge": "-m cosyvoice.training.merge --checkpoint exp/tiny/train/global_step_20 "
        "--base exp/tiny/hf "
        "--target exp/tiny/merged/global_step_20",
        "cosyvoice.evaluation.report": "-m cosyvoice.evaluation.report exp/tiny",
        "huggingface_to_pretrained.py": "huggingface_to_pretrained.py --hf-cosyvoice2-llm-path "
        "exp/tiny/merged/global_step_20 --output-path exp/tiny/export/llm.pt",
        "scripts/check_export.py": "scripts/check_export.py --merged exp/tiny/merged/global_step_20 "
        "--llm-pt exp/tiny/export/llm.pt",
    }
    for name, words in expected.items():
        (args,) = calls[name]
        assert args[: len(words.split())] == words.split()
    for system, (args, score) in zip(
        (
            ("before", "hf", "train"),
            ("step_20", "merged/global_step_20", "train"),
            ("before_greedy", "hf", "greedy"),
            ("step_20_greedy", "merged/global_step_20", "greedy"),
        ),
        zip(calls["infer_dataset.py"], calls["scripts/offline-decode-files.py"]),
    ):
        words = (
            f"infer_dataset.py --llm exp/tiny/{system[1]} --model-dir {tiny} --split {tiny}/data/test.jsonl "
            f"--output-dir exp/tiny/eval/{system[0]} --prompts {tiny}/prompts/prompts.jsonl --sampling {system[2]}"
        ).split()
        assert args[: len(words)] == words
        assert score == [
            "scripts/offline-decode-files.py", f"exp/tiny/eval/{system[0]}", f"{tiny}/data/test.jsonl",
            "--judge", f"{tiny}/judge",
        ]  # fmt: skip
    pythons = {(Path(r["python"]).parts[-3], r["args"][0]) for r in recipe.records() if r["python"]}
    assert {name for env, name in pythons if env == "reward" and name != "-m"} == {
        "token2wav_asr_server.py",
        "scripts/offline-decode-files.py",
    }


def test_training_gets_overrides_in_order_of_precedence(recipe):
    recipe.run(-1, 0)
    recipe.write("conf/algorithms/mine.sh", "algorithm_overrides=(a.b=algorithm a.c=algorithm)\n")
    with (recipe.folder / "conf/tiny.sh").open("a") as conf:
        conf.write("profile_overrides+=(a.b=profile a.c=profile a.d=profile)\n")
    status, output = recipe.run(
        2,
        "--algorithm",
        "mine",
        "--server-urls",
        "http://a:1,http://b:2",
        "--name",
        "tiny",
        "--",
        "a.b=user",
        "+x.y=[1,2]",
    )
    assert status == 0, output
    assert recipe.calls()[2] == [
        "reward_tts.py",
        "--check",
        "--urls",
        "http://a:1,http://b:2",
        "--wait",
        "30",
    ]
    preflight, train, _ = recipe.calls()[3:]
    values = overrides(train)  # as Hydra: the last one wins
    assert [values[key] for key in ("a.b", "a.c", "a.d", "+x.y")] == ["user", "algorithm", "profile", "[1,2]"]
    assert overrides(preflight).items() <= values.items()
    run_dir = f"{recipe.folder}/exp/tiny"
    assert values["data.train_files"] == f"{run_dir}/data/train.parquet"
    assert values["actor_rollout_ref.model.path"] == f"{run_dir}/hf"
    assert values["trainer.default_local_dir"] == f"{run_dir}/train"
    assert values["trainer.nnodes"] == "1"
    assert values["+reward.custom_reward_function.reward_kwargs.urls"] == "'http://a:1,http://b:2'"
    environment = recipe.training()["env"]
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["TENSORBOARD_DIR"] == f"{run_dir}/train/tensorboard"
    ray_folder = values["+ray_kwargs.ray_init._temp_dir"]
    assert len(ray_folder) < 40  # a socket's path below it may have 107 characters
    assert not Path(ray_folder).exists()  # gone with the run


def test_8gpu_profile_trains_on_the_gpus_it_sees_and_starts_as_many_workers(recipe):
    shutil.copytree(recipe.folder / "assets/cosyvoice2-tiny", recipe.folder / "pretrained/CosyVoice2-0.5B")
    recipe.write("bin/nvidia-smi", "#!/bin/sh\nseq 0 3\n").chmod(0o755)
    path = {"PATH": f"{recipe.folder}/bin:/usr/bin:/bin"}
    data = ("--data-jsonl", recipe.write("all.jsonl"), "--shuffle-seed", 5)
    status, output = recipe.run(-1, 2, *data, **path)
    assert status == 0, output
    calls = {args[1] if args[0] == "-m" else args[0]: args for args in recipe.calls()}
    assert calls["pretrained_to_huggingface.py"][-1] == "bfloat16"
    assert (
        calls["scripts/split_jsonl.py"][1:]
        == (
            f"--input {data[1]} --train-file exp/8gpu/data/train.jsonl --test-file exp/8gpu/data/test.jsonl "
            "--n-train 80000 --n-test 100 --shuffle-seed 5"
        ).split()
    )
    assert (
        calls["token2wav_asr_server.py"][calls["token2wav_asr_server.py"].index("--number-of-devices") + 1]
        == "4"
    )
    assert overrides(calls["verl.trainer.main_ppo"])["trainer.n_gpus_per_node"] == "4"
    assert "VERL_PLATFORM" not in recipe.training()["env"]
    assert recipe.run(2, "--n-gpus", 2, **path)[0] == 0
    assert overrides(recipe.training()["args"])["trainer.n_gpus_per_node"] == "2"


def test_cluster_address_replaces_a_ray_of_our_own(recipe):
    recipe.run(-1, 0)
    assert recipe.run(2, "--nnodes", 2, "--ray-address", "10.0.0.1:6379")[0] == 0
    values = overrides(recipe.training()["args"])
    assert values["trainer.nnodes"] == "2"
    assert values["+ray_kwargs.ray_init.address"] == "10.0.0.1:6379"
    assert "+ray_kwargs.ray_init._temp_dir" not in values


def test_done_stage_is_skipped_until_its_inputs_change(recipe):
    assert recipe.run(0)[0] == 0
    status, output = recipe.run(0)
    assert status == 0
    assert "skipped" in output
    assert len(recipe.calls()) == 1
    recipe.write("assets/cosyvoice2-tiny/data/train.jsonl", "another")
    assert recipe.run(0)[0] == 0
    assert len(recipe.calls()) == 2
    (recipe.folder / "exp/tiny/data/test.parquet").unlink()
    assert recipe.run(0)[0] == 0
    assert len(recipe.calls()) == 3
    assert recipe.run("--force", 0)[0] == 0
    assert recipe.run(0, "--force", "true")[0] == 0
    assert len(recipe.calls()) == 5
    assert recipe.run(0, "--force", "false")[0] == 0
    assert len(recipe.calls()) == 5


@pytest.mark.parametrize("stage", [-1, 0, 3, 4, 5])
def test_missing_input_is_named(recipe, stage):
    shutil.rmtree(recipe.folder / "assets")
    status, output = recipe.run(stage)
    assert status == 1
    assert recipe.calls() == []
    assert re.search(r"error: \S+ is not there; ", output)


@pytest.mark.parametrize(
    ("stage", "script"),
    [
        (-1, "pretrained_to_huggingface.py"), (0, "prepare_data.py"), (1, "token2wav_asr_server.py"),
        (2, "reward_tts.py"), (3, "cosyvoice/training/merge.py"), (4, "infer_dataset.py"),
        (5, "huggingface_to_pretrained.py"),
    ],
)  # fmt: skip
def test_missing_script_is_said_and_fails(recipe, stage, script):
    (recipe.folder / script).unlink()
    status, output = recipe.run(stage)
    assert status == 1
    assert f"stage {stage}: {script} is not there yet" in output


@pytest.mark.parametrize(
    ("script", "stage", "begun"),
    [
        ("pretrained_to_huggingface.py", -1, 1),
        ("prepare_data.py", 0, 2),
        ("cosyvoice.training.preflight", 2, 5),
        ("verl.trainer.main_ppo", 2, 6),
    ],
)
def test_failing_stage_ends_the_range_with_its_status_and_no_marker(recipe, script, stage, begun):
    status, output = recipe.run(-1, 3, FAIL=script)
    assert status == 1
    assert f"stage {stage} failed with status 7" in output
    assert recipe.names()[-1] == ("server stopped" if stage == 2 else script)
    assert len(recipe.names()) == begun + (stage == 2)
    assert not (recipe.folder / f"exp/tiny/.done/{stage}").exists()
    assert recipe.left_over() == []


def test_server_that_dies_at_its_start_ends_the_range_with_its_words(recipe):
    recipe.run(-1, 0)
    started = time.monotonic()
    status, output = recipe.run(1, 2, FAIL="token2wav_asr_server.py", HANG="reward_tts.py")
    assert status == 1
    assert "the reward server ended with status 7 before it was ready" in output
    assert time.monotonic() - started < 30  # it does not wait for the 900 s of --server-wait
    assert "verl.trainer.main_ppo" not in recipe.names()
    assert recipe.left_over() == []


def test_server_that_cannot_score_ends_the_range(recipe):
    recipe.run(-1, 0)
    status, output = recipe.run(1, 2, FAIL="reward_tts.py")
    assert status == 1
    assert "did not score the known sentence" in output
    assert recipe.left_over() == []


def test_training_without_a_server_is_one_sentence(recipe):
    recipe.run(-1, 0)
    status, output = recipe.run(2, FAIL="reward_tts.py")
    assert status == 1
    assert "no reward server at http://127.0.0.1:8000" in output
    assert recipe.names()[-1] == "reward_tts.py"


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_during_training_leaves_no_process(recipe, number):
    recipe.run(-1, 0)
    process = recipe.start(1, 3, HANG="verl.trainer.main_ppo")
    wait_until((recipe.folder / "calls.jsonl.hanging").exists)
    assert len(recipe.left_over()) >= 4  # driver, server, training and its detached child
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert recipe.left_over() == []
    assert recipe.names()[-1] == "server stopped"  # asked first, not killed
    assert "cosyvoice.training.merge" not in recipe.names()


def test_server_alone_runs_in_the_foreground_until_it_is_interrupted(recipe):
    process = recipe.start(1)
    wait_until(lambda: recipe.names() == ["token2wav_asr_server.py"])
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert "serving" in output  # its words are shown, not hidden in a log
    assert recipe.names() == ["token2wav_asr_server.py", "server stopped"]
    assert recipe.left_over() == []


def test_next_start_ends_what_a_killed_driver_left(recipe):
    recipe.run(-1, 0)
    process = recipe.start(1, 2, HANG="verl.trainer.main_ppo")
    wait_until((recipe.folder / "calls.jsonl.hanging").exists)
    process.kill()
    process.wait(timeout=30)
    assert len(recipe.left_over()) >= 3
    status, output = recipe.run(0)
    assert status == 0
    assert f"an earlier run (pid {process.pid}) left behind" in output
    assert recipe.left_over() == []


def test_a_run_at_work_is_left_alone_by_another_one(recipe):
    process = recipe.start(1)
    wait_until(lambda: recipe.names() == ["token2wav_asr_server.py"])
    assert recipe.run(0)[0] == 0
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)


def checkpoint(recipe, step, shards=2, world=2):
    for rank in range(shards):
        recipe.write(f"exp/tiny/train/global_step_{step}/actor/model_world_size_{world}_rank_{rank}.pt")
    recipe.write(f"exp/tiny/train/global_step_{step}/actor/huggingface/config.json")


def merged_steps(recipe):
    return [args[3].rsplit("_", 1)[1] for args in recipe.calls() if "cosyvoice.training.merge" in args]


@pytest.mark.parametrize(
    ("step", "expected"), [("latest", ["10"]), ("9", ["9"]), ("all", ["9", "10", "100"])]
)
def test_steps_to_merge(recipe, step, expected):
    for n in (100, 9, 10):
        checkpoint(recipe, n)
    recipe.write("exp/tiny/train/latest_checkpointed_iteration.txt", "10\n")
    assert recipe.run(3, "--step", step)[0] == 0
    assert merged_steps(recipe) == expected


def test_incomplete_checkpoint_is_refused(recipe):
    checkpoint(recipe, 10, shards=1, world=2)
    recipe.write("exp/tiny/train/latest_checkpointed_iteration.txt", "10")
    status, output = recipe.run(3)
    assert status == 1
    assert "exp/tiny/train/global_step_10/actor has 1 model shards, expected 2" in output
    assert recipe.calls() == []


def test_step_that_is_not_there_is_refused(recipe):
    checkpoint(recipe, 10)
    status, output = recipe.run(3, "--step", 11)
    assert status == 1
    assert "exp/tiny/train/global_step_11/actor is not there" in output
