"""Pushing to a server that speaks the Hub's HTTP API, by the real client in a process of its own."""

import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.hub import hub_client
from tests.hub.hub_client import TOKEN
from tests.hub.hub_server import HubServer, Repo
from unsloth_trl.hub.kinds import kinds_among


TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
BESIDE = TOKENIZER | {"generation_config.json", "README.md"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "base_model_state.json"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The server, and `run(function, ...)` for what a client does with it."""
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_HUB_DISABLE_XET", "1")  # xet has a storage of its own, which this server is not
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
        patch.delenv("HF_TOKEN", raising=False)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client:
            server.run = lambda function, *args, **kwargs: client.submit(
                hub_client.call, function, *args, **kwargs
            ).result(timeout=120)
            yield server


@pytest.fixture(autouse=True)
def settled(hub):
    """Each test sees its own requests, and leaves no failure behind."""
    hub.requests.clear()
    hub.uploads.clear()
    yield
    assert not [failure for failure in hub.failures if failure.times], "a failure that was asked for did not happen"
    hub.failures.clear()


@pytest.fixture(scope="module")
def base(hub, tmp_path_factory):
    """A base model in a folder of the Hub's cache: its repository's name is known from the path."""
    folder = tmp_path_factory.mktemp("cache") / "models--someone--tiny" / "snapshots" / ("a" * 40)
    hub.run(hub_client.save_base, str(folder))
    return str(folder)


def succeed(outcome):
    result, said, error = outcome
    assert not error, f"{error}\n{said}"
    assert TOKEN not in said
    return result


def fail(outcome) -> str:
    """The error, in which the token is not; nor is it in anything that was said."""
    _, said, error = outcome
    assert error and TOKEN not in error and TOKEN not in said
    return error


def files_of(hub, repo_id: str) -> set[str]:
    return {name for name in hub.repos[repo_id].files if "/" not in name}


def write(hub, repo_id: str, folder: Path) -> Path:
    for name, content in hub.repos[repo_id].files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def assert_usable_tokenizer(folder: Path, base: str) -> None:
    tokenizer, expected = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(base)
    assert tokenizer.chat_template == expected.chat_template and "messages" in tokenizer.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<eos>", "<pad>", "<bos>")
    assert tokenizer.all_special_tokens == expected.all_special_tokens
    ids = tokenizer("w9 w10 <eos>").input_ids
    assert ids == expected("w9 w10 <eos>").input_ids and ids[-1] == tokenizer.eos_token_id
    assert GenerationConfig.from_pretrained(folder).max_new_tokens == 7


@pytest.fixture(scope="module")
def trained(hub, base, tmp_path_factory):
    """A run of 4 steps that pushed its checkpoint of step 2 and its end, with its losses and requests."""
    output_dir = tmp_path_factory.mktemp("run") / "out"
    hub.requests.clear()
    losses = succeed(
        hub.run(
            hub_client.train,
            base,
            str(output_dir),
            push_to_hub=True,
            hub_strategy="checkpoint",
            hub_model_id="someone/adapter",
        )
    )
    return losses, list(hub.requests)


def test_b63_a_trainer_pushes_to_a_repository_that_was_private_first(hub, trained):
    _, requests = trained
    created = requests.index("POST /api/repos/create")
    writes = [i for i, request in enumerate(requests) if re.search("preupload|lfs|commit", request)]
    assert writes and created < writes[0]
    assert hub.repos["someone/adapter"].private is True
    messages = [commit["message"] for commit in hub.repos["someone/adapter"].commits]
    steps = [f"Training in progress, step {step}{what}" for step in (2, 4) for what in ("", ", checkpoint")]
    assert messages == ["initial commit", *steps, "End of training"]


def test_b63_the_pushed_adapter_is_whole(hub, trained, base, tmp_path):
    expected = BESIDE | ADAPTER | {"training_args.bin"}
    assert files_of(hub, "someone/adapter") == expected
    folder = write(hub, "someone/adapter", tmp_path)
    assert_usable_tokenizer(folder, base)
    card = ModelCard.load(folder / "README.md")
    assert {"trl", "sft", "unsloth_trl"} <= set(card.data.tags)
    assert (card.data.base_model, card.data.datasets) == ("someone/tiny", ["someone/words"])
    assert "tokens a second on CPU" in card.text and "unsloth_trl patches:" in card.text


def test_b63_the_token_is_in_no_pushed_file(hub, trained):
    assert TOKEN in hub.tokens  # it was passed on
    for repo in hub.repos.values():
        for name, content in repo.files.items():
            assert TOKEN.encode() not in content, name


def test_b63_a_config_of_trl_is_warned_of(hub, base, tmp_path):
    """Its token would be in training_args.bin."""
    where = {"push_to_hub": True, "hub_model_id": "someone/of-trl"}
    _, said, error = hub.run(hub_client.make_trainer, base, str(tmp_path / "out"), of_trl=True, **where)
    assert not error and "hub_token of a TRL config is written into training_args.bin" in said
    _, said, error = hub.run(hub_client.make_trainer, base, str(tmp_path / "out"), **where)
    assert not error and "training_args.bin" not in said


def test_b60_pushed_files_name_the_repository_of_the_base(hub, trained, base):
    files = hub.repos["someone/adapter"].files
    for folder in ("", "last-checkpoint/"):
        config = json.loads(files[f"{folder}adapter_config.json"])
        assert config["base_model_name_or_path"] == "someone/tiny"
        for name, content in files.items():
            if not name.endswith((".bin", ".pt", ".pth")):  # pickles: the run's own settings
                assert base.encode() not in content, name


def test_b60_a_local_base_is_warned_of(hub, tmp_path):
    base = str(tmp_path / "my-base")
    hub.run(hub_client.save_base, base)
    config = {"push_to_hub": True, "hub_model_id": "someone/local", "max_steps": 1}
    _, said, error = hub.run(hub_client.train, base, str(tmp_path / "out"), **config)
    assert not error
    assert f"Pushing to someone/local: the base model is known only as the folder {base!r}" in said
    assert "peft_config['default'].base_model_name_or_path = 'owner/name'" in said
    files = hub.repos["someone/local"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == base
    assert b"**The base model is not on the Hub**" in files["README.md"]
    assert str(tmp_path).encode() not in files["README.md"]


def test_resume_from_the_checkpoint_that_was_pushed_when_the_run_died(hub, trained, base, tmp_path):
    losses, _ = trained
    commits = hub.repos["someone/adapter"].commits
    then = next(commit["id"] for commit in commits if commit["message"] == "Training in progress, step 2, checkpoint")
    where = ("someone/adapter", str(tmp_path / "hub"), "last-checkpoint/*", then)
    names = succeed(hub.run(hub_client.download, *where))
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/trainer_state.json"} <= set(names)
    checkpoint = tmp_path / "hub" / "last-checkpoint"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 2
    resumed = succeed(hub.run(hub_client.train, base, str(tmp_path / "out"), resume=str(checkpoint)))
    assert len(losses) == 4 and resumed[:2] == losses[:2]  # the log of the first two comes with the checkpoint
    assert resumed[2:] == pytest.approx(losses[2:], abs=1e-6)


def test_every_save_pushes_each_checkpoint(hub, base, tmp_path):
    config = {"hub_model_id": "someone/saves", "hub_strategy": "every_save"}
    succeed(hub.run(hub_client.train, base, str(tmp_path), push_to_hub=True, peft=False, max_steps=5, **config))
    messages = [commit["message"] for commit in hub.repos["someone/saves"].commits]
    assert messages[1:] == [*(f"Training in progress, step {step}" for step in (2, 4, 5)), "End of training"]
    files = files_of(hub, "someone/saves")
    assert list(kinds_among(files)) == ["merged"] and BESIDE <= files
    for name in ("model.safetensors", "README.md"):
        assert hub.repos["someone/saves"].files[name] == (tmp_path / name).read_bytes()
    assert not [name for name in hub.repos["someone/saves"].files if "/" in name]


def test_b63_merged_weights_are_whole(hub, base, tmp_path):
    succeed(hub.run(hub_client.push_merged, base, "someone/merged", private=True))
    created = hub.requests.index("POST /api/repos/create")
    assert created < min(i for i, request in enumerate(hub.requests) if re.search("preupload|lfs|commit", request))
    assert hub.repos["someone/merged"].private is True
    files = files_of(hub, "someone/merged")
    assert files == BESIDE | {"config.json", "model.safetensors"}
    folder = write(hub, "someone/merged", tmp_path)
    assert_usable_tokenizer(folder, base)
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "someone/tiny" and "unsloth_trl" in card.data.tags
    model, _ = hub_client.adapted(base)
    ids = AutoTokenizer.from_pretrained(base)("w9 w10 w11", return_tensors="pt").input_ids
    expected = model.eval()(input_ids=ids).logits
    assert (AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits - expected).abs().max() < 1e-4


def test_an_adapter_alone(hub, base, tmp_path):
    succeed(hub.run(hub_client.push_merged, base, "someone/lora", save_method="lora"))
    assert hub.repos["someone/lora"].private is None  # what the account has set
    files = files_of(hub, "someone/lora")
    assert files == BESIDE | ADAPTER
    assert_usable_tokenizer(write(hub, "someone/lora", tmp_path), base)
    config = json.loads(hub.repos["someone/lora"].files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "someone/tiny"


def test_b63_gguf_files_come_with_the_tokenizer(hub, tmp_path):
    base = str(tmp_path / "models--someone--bpe" / "snapshots" / ("b" * 40))
    succeed(hub.run(hub_client.save_bpe_base, base))
    succeed(hub.run(hub_client.push_gguf, base, "someone/gguf", private=True, quantization_method=["f16", "q8_0"]))
    files = files_of(hub, "someone/gguf")
    assert list(kinds_among(files)) == ["gguf"] and BESIDE <= files
    assert {"gguf-F16.gguf", "gguf-Q8_0.gguf"} <= files
    assert not [name for name in hub.repos["someone/gguf"].files if "/" in name]
    folder = write(hub, "someone/gguf", tmp_path / "hub")
    assert_usable_tokenizer(folder, base)
    assert (folder / "gguf-F16.gguf").read_bytes()[:4] == b"GGUF"
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "someone/bpe" and {"gguf", "unsloth_trl"} <= set(card.data.tags)
    assert "gguf-Q8_0.gguf" in card.text


def test_b63_every_chat_template_of_a_tokenizer_is_pushed(hub, tmp_path):
    base = str(tmp_path / "models--someone--bpe" / "snapshots" / ("b" * 40))
    succeed(hub.run(hub_client.save_bpe_base, base, templates=True))
    succeed(hub.run(hub_client.push_merged, base, "someone/templates"))
    succeed(hub.run(hub_client.push_gguf, base, "someone/templates-gguf"))
    for repo_id in ("someone/templates", "someone/templates-gguf"):
        folder = write(hub, repo_id, tmp_path / repo_id)
        expected = AutoTokenizer.from_pretrained(base).chat_template
        assert AutoTokenizer.from_pretrained(folder).chat_template == expected and set(expected) == {
            "default",
            "tools",
        }
        assert not (folder / "merged_16bit").exists()


def test_b63_a_public_repository_gets_nothing_private(hub, base, tmp_path):
    hub.repos["someone/public"] = Repo(private=False)
    error = fail(hub.run(hub_client.push_merged, base, "someone/public", private=True))
    assert "the repository someone/public exists and is public, and private=True cannot change that" in error
    where = {"push_to_hub": True, "hub_model_id": "someone/public", "hub_private_repo": True}
    assert "exists and is public" in fail(hub.run(hub_client.make_trainer, base, str(tmp_path / "out"), **where))
    assert not files_of(hub, "someone/public") and not hub.uploads
    succeed(hub.run(hub_client.push_merged, base, "someone/public"))
    assert "model.safetensors" in files_of(hub, "someone/public")


def test_b63_no_tokenizer_is_said(hub, base):
    _, said, error = hub.run(hub_client.push_merged, base, "someone/alone", with_tokenizer=False)
    assert not error and "someone/alone gets no tokenizer, and will not load without one: pass tokenizer=" in said


def test_b62_a_repository_gets_one_kind(hub, base, tmp_path, trained):
    before = dict(hub.repos["someone/adapter"].files)
    error = fail(hub.run(hub_client.push_merged, base, "someone/adapter"))
    assert "the repository someone/adapter holds an adapter (adapter_config.json, adapter_model.safetensors)" in error
    assert "is to get whole weights" in error and "push to another repository" in error
    assert hub.repos["someone/adapter"].files == before
    # a trainer is refused before it trains
    error = fail(
        hub.run(
            hub_client.make_trainer,
            base,
            str(tmp_path / "out"),
            push_to_hub=True,
            peft=False,
            hub_model_id="someone/adapter",
        )
    )
    assert "the repository someone/adapter holds an adapter" in error


def test_b62_a_folder_that_is_pushed_has_one_kind(hub, base, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"of an earlier run")
    error = fail(hub.run(hub_client.make_trainer, base, str(tmp_path), push_to_hub=True, hub_model_id="someone/two"))
    assert f"the folder {tmp_path} holds whole weights (model.safetensors) and is to get an adapter" in error
    assert "someone/two" not in hub.repos


def test_shards_of_an_earlier_push_go(hub, base, tmp_path):
    succeed(hub.run(hub_client.push_merged, base, "someone/shards", max_shard_size="40KB"))
    shards = [name for name in files_of(hub, "someone/shards") if name.startswith("model-")]
    assert len(shards) > 1 and "model.safetensors.index.json" in files_of(hub, "someone/shards")
    succeed(hub.run(hub_client.push_merged, base, "someone/shards"))
    assert kinds_among(files_of(hub, "someone/shards")) == {"merged": ["model.safetensors"]}
    AutoModelForCausalLM.from_pretrained(write(hub, "someone/shards", tmp_path))


@pytest.mark.parametrize("token", ["hf_expired", None])
def test_a_token_that_is_refused_is_one_clear_error(hub, base, token, tmp_path):
    error = fail(hub.run(hub_client.push_merged, base, "someone/refused", token=token))
    assert error.startswith("PermissionError: the Hub does not know who writes to someone/refused (401)")
    assert "hf auth login" in error and "hf_expired" not in error and "\n" not in error
    assert not hub.uploads and "someone/refused" not in hub.repos
    config = {"push_to_hub": True, "hub_model_id": "someone/refused", "hub_token": token}
    error = fail(hub.run(hub_client.make_trainer, base, str(tmp_path / "out"), **config))
    assert error.startswith("PermissionError: the Hub does not know who writes to someone/refused (401)")


def test_a_server_error_in_an_upload_is_tried_again(hub, base, tmp_path):
    hub.fail("PUT /lfs/", 503)
    succeed(hub.run(hub_client.push_merged, base, "someone/again", seed=1))
    assert len([request for request in hub.requests if request.startswith("PUT /lfs/")]) == 2
    assert files_of(hub, "someone/again") == BESIDE | {"config.json", "model.safetensors"}
    AutoModelForCausalLM.from_pretrained(write(hub, "someone/again", tmp_path))


def test_a_push_that_broke_off_goes_on_with_what_is_missing(hub, base, tmp_path):
    hub.fail("POST .*/commit/", 500)
    error = fail(hub.run(hub_client.push_merged, base, "someone/broken", seed=2))
    assert error.startswith("OSError: the upload to someone/broken was not finished: ") and "500" in error
    kept = Path(re.search(r"the files are in (\S+): `hf upload someone/broken", error)[1])
    assert {path.name for path in kept.iterdir()} == BESIDE | {"config.json", "model.safetensors"}
    assert not files_of(hub, "someone/broken") and len(hub.uploads) == 1  # the weights have arrived
    succeed(hub.run(hub_client.push_merged, base, "someone/broken", seed=2))
    assert len(hub.uploads) == 1  # and are not sent again
    assert files_of(hub, "someone/broken") == BESIDE | {"config.json", "model.safetensors"}
    AutoModelForCausalLM.from_pretrained(write(hub, "someone/broken", tmp_path))


def test_a_trainer_goes_on_after_a_push_that_failed(hub, base, tmp_path):
    """The push in the middle fails; the run goes on, and its end has all files."""
    hub.fail("POST .*/preupload/", 400)
    config = {"hub_model_id": "someone/middle", "hub_strategy": "every_save"}
    losses = succeed(hub.run(hub_client.train, base, str(tmp_path / "out"), push_to_hub=True, **config))
    assert len(losses) == 4
    assert hub.repos["someone/middle"].commits[-1]["message"] == "End of training"
    files = files_of(hub, "someone/middle")
    assert files == BESIDE | ADAPTER | {"training_args.bin"}
    folder = write(hub, "someone/middle", tmp_path / "hub")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    AutoPeftModelForCausalLM.from_pretrained(folder)


def test_the_command_line_pushes_what_it_has_trained(hub, base, tmp_path):
    rows = "".join(json.dumps({"text": f"w{i} w{i + 1} w{i + 2}"}) + "\n" for i in range(9, 25))
    (tmp_path / "rows.jsonl").write_text(rows)
    options = {"dataset_name": tmp_path / "rows.jsonl", "output_dir": tmp_path / "out", "max_steps": 1, "bf16": False}
    options |= {"model_name_or_path": base, "hub_model_id": "someone/cli", "hub_private_repo": True}
    flags = ["--use_cpu", "--use_peft", "--push_to_hub", "--report_to", "none", "--per_device_train_batch_size", "2"]
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert succeed(hub.run(hub_client.command_line, "sft", *arguments, *flags)) == 0
    repo = hub.repos["someone/cli"]
    assert repo.private is True
    # the checkpoint of the last step, and the end, which has the name of the data
    assert [commit["message"] for commit in repo.commits][-1] == "End of training"
    expected = BESIDE | ADAPTER | {"training_args.bin"}
    assert files_of(hub, "someone/cli") == expected
    readme = repo.files["README.md"].decode()
    assert "`rows.jsonl`" in readme and str(tmp_path) not in readme and "base_model: someone/tiny" in readme


def test_the_command_line_pushes_what_it_has_merged(hub, tmp_path):
    base = str(tmp_path / "models--someone--bpe" / "snapshots" / ("b" * 40))
    succeed(hub.run(hub_client.save_bpe_base, base))
    adapter = str(tmp_path / "adapter")
    succeed(hub.run(hub_client.save_adapter, base, adapter))
    for command, repo_id in (("merge", "someone/cli-merged"), ("export-gguf", "someone/cli-gguf")):
        push = ["--push_to_hub", repo_id, "--private"]
        assert succeed(hub.run(hub_client.command_line, command, adapter, str(tmp_path / command), *push)) == 0
        assert (
            hub.repos[repo_id].private is True and b"base_model: someone/bpe" in hub.repos[repo_id].files["README.md"]
        )
    assert files_of(hub, "someone/cli-merged") == BESIDE | {"config.json", "model.safetensors"}
    files = files_of(hub, "someone/cli-gguf")
    assert list(kinds_among(files)) == ["gguf"] and BESIDE <= files and "config.json" not in files
    # a merged folder is exported as it is
    push = ["--push_to_hub", "someone/cli-gguf-2"]
    arguments = ["export-gguf", str(tmp_path / "merge"), str(tmp_path / "again"), *push]
    assert succeed(hub.run(hub_client.command_line, *arguments)) == 0
    files = files_of(hub, "someone/cli-gguf-2")
    assert list(kinds_among(files)) == ["gguf"] and BESIDE <= files
