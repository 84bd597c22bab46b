"""Names on the Hub, against a local server: a model, a private one, an adapter, a GGUF file, a wrong name."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hub.gguf_models import byte_level_tokenizer, model_folder, split_steps
from tests.hub.hub_server import HubServer, Repo
from tests.models import loading_hub_client as client
from tests.models.test_loading import save


TOKEN = "hf_writetoken"


def put(server: HubServer, name: str, folder: Path, private: bool | None = None) -> None:
    repo = server.repos[name] = Repo(private)
    files = [
        (str(path.relative_to(folder)), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()
    ]
    server.commit(repo, "files", files)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
        patch.delenv("HF_TOKEN", raising=False)
        folder = tmp_path_factory.mktemp("base")
        save(folder)
        put(server, "someone/tiny", folder)
        put(server, "someone/secret", folder, private=True)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            server.run = lambda function, *args, **kwargs: process.submit(function, *args, **kwargs).result(
                timeout=120
            )
            server.folder = folder
            yield server


@torch.no_grad()
def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(input_ids=client.IDS, use_cache=False).logits


def test_a_model_and_its_adapter(hub, tmp_path):
    loaded = hub.run(client.load, "someone/tiny")
    assert torch.equal(torch.tensor(loaded["logits"]), logits(hub.folder))
    assert (loaded["tokens"], loaded["adapter"], loaded["name"]) == ([10, 11], False, "someone/tiny")
    hub.run(client.adapt, "someone/tiny", str(tmp_path / "adapter"))
    put(hub, "someone/adapter", tmp_path / "adapter")
    adapted = hub.run(client.load, "someone/adapter")
    assert adapted["adapter"] and adapted["base"] == adapted["name"] == "someone/tiny"
    local = hub.run(client.load, str(tmp_path / "adapter"))
    assert adapted["logits"] == local["logits"] != loaded["logits"]


def test_a_private_model_needs_its_token(hub):
    with pytest.raises(OSError, match="someone/secret"):
        hub.run(client.load, "someone/secret")
    loaded = hub.run(client.load, "someone/secret", token=TOKEN)
    assert torch.equal(torch.tensor(loaded["logits"]), logits(hub.folder))


def test_a_name_that_is_not_there(hub):
    with pytest.raises(OSError, match="someone/nothing"):
        hub.run(client.load, "someone/nothing")


def test_a_gguf_file(hub, tmp_path):
    pytest.importorskip("gguf", reason="the test extra has it")
    from unsloth_trl.hub.gguf import export_gguf

    model_folder(tmp_path / "model", "llama", byte_level_tokenizer(split_steps(None)), torch.float32)
    export_gguf(tmp_path / "model", tmp_path / "gguf", "f32")
    put(hub, "someone/gguf", tmp_path / "gguf")
    expected = logits(tmp_path / "model")
    for source in ({"name": "someone/gguf/model-F32.gguf"}, {"name": "someone/gguf", "gguf_file": "model-F32.gguf"}):
        loaded = hub.run(client.load, **source)
        assert torch.allclose(torch.tensor(loaded["logits"]), expected, atol=1e-4)
        assert loaded["name"] == "someone/gguf/model-F32.gguf"
    hub.run(client.adapt, "someone/gguf/model-F32.gguf", str(tmp_path / "adapter"))
    adapted = hub.run(client.load, str(tmp_path / "adapter"))
    assert adapted["adapter"] and adapted["base"] == "someone/gguf/model-F32.gguf"
    assert not torch.allclose(torch.tensor(adapted["logits"]), expected, atol=1e-1)
