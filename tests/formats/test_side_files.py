"""What goes along into an output; the faults of links are in test_checkpoint.py."""

from compress_llm.formats.side_files import side_files


def test_new_kinds_of_files_go_along_and_weights_never_do(tmp_path):
    kept = ["brand_new_tokenizer.xyz", "NOTICE", "special_tokens_map.json", "vocab.json"]
    left = [
        "model.safetensors",
        "x.INDEX.json",
        "model.safetensors.index.json",
        "rust_model.ot",
        "README.MD",
        "run.json",
    ]
    for name in kept + left:
        (tmp_path / name).write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.json").write_text("")
    assert side_files(tmp_path) == sorted(kept)
