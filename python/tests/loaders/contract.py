"""Checks whether the newest wheels of packages that use dmafile changed anything it relies on.

contract.py [PACKAGE ...] downloads each wheel with pip (1 GB in all, deleted at the end) and parses
its source with `ast`; nothing is imported or installed. Exit status 1: something has changed.
"""

import ast
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Read = Callable[[str], str]
"""Returns the text of a file of a wheel; raises KeyError if there is none."""


class Moved(Exception):
    """Something is missing or has changed."""


def found(read: Read, file: str, name: str) -> ast.AST:
    """A class or function, by its dotted name."""
    try:
        node: ast.AST = ast.parse(read(file))
    except KeyError:
        raise Moved(f"there is no {file}") from None
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inner = [one for one in ast.walk(node) if isinstance(one, kinds) and one.name == part]
        if not inner:
            raise Moved(f"{file}: there is no {name}")
        node = inner[0]
    return node


@dataclass(frozen=True)
class Call:
    """A function that is called with these arguments, by position or name."""

    file: str
    name: str
    arguments: str

    def check(self, read: Read) -> None:
        node = found(read, self.file, self.name)
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        have, passed = node.args, self.arguments.split()
        plain = [
            one.arg for one in (*have.posonlyargs, *have.args) if one.arg not in ("self", "cls")
        ]
        named = [one.arg for one in have.kwonlyargs]
        needed = plain[: len(plain) - len(have.defaults)]
        needed += [
            one.arg
            for one, default in zip(have.kwonlyargs, have.kw_defaults, strict=True)
            if default is None
        ]
        for one in passed:
            if one not in plain + named and have.kwarg is None:
                raise Moved(f"{self.file}: {self.name} has no argument {one}")
        if more := [one for one in needed if one not in passed]:
            raise Moved(f"{self.file}: {self.name} needs {', '.join(more)}")
        order = [one for one in plain if one in passed]
        if order != [one for one in passed if one in plain]:
            raise Moved(f"{self.file}: the arguments of {self.name} are in another order: {order}")


@dataclass(frozen=True)
class Has:
    """A class, or a module (no name), with these methods, fields, constants or attributes."""

    file: str
    name: str
    members: str

    def check(self, read: Read) -> None:
        if self.name:
            node = found(read, self.file, self.name)
        else:
            try:
                node = ast.parse(read(self.file))
            except KeyError:
                raise Moved(f"there is no {self.file}") from None
        have = set(members(node))
        if gone := [one for one in self.members.split() if one not in have]:
            raise Moved(f"{self.file}: {self.name or 'it'} has no {', '.join(gone)}")


def members(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        match one:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)


@dataclass(frozen=True)
class Says:
    """A class or function whose source contains this text."""

    file: str
    name: str
    text: str

    def check(self, read: Read) -> None:
        if self.text not in ast.unparse(found(read, self.file, self.name)):
            raise Moved(f"{self.file}: {self.name} no longer says: {self.text}")


@dataclass(frozen=True)
class Same:
    """A function that dmafile reimplements: if it changes, it must be read again."""

    file: str
    name: str
    digest: str

    def check(self, read: Read) -> None:
        text = ast.unparse(found(read, self.file, self.name))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest != self.digest:
            raise Moved(f"{self.file}: {self.name} is not what it was, but {digest}: read it again")


LOADER = "vllm/model_executor/model_loader"
DCP = "torch/distributed/checkpoint"
SGLANG = "sglang/srt"

EXPECTED: dict[str, list[Call | Has | Says | Same]] = {
    "vllm": [
        Has("vllm/plugins/__init__.py", "", "DEFAULT_PLUGINS_GROUP load_general_plugins"),
        Call(f"{LOADER}/__init__.py", "register_model_loader", "load_format"),
        Has("vllm/config/load.py", "LoadConfig", "load_format model_loader_extra_config"),
        Has("vllm/config/load.py", "LoadConfig", "use_tqdm_on_load safetensors_load_strategy"),
        Call(f"{LOADER}/default_loader.py", "DefaultModelLoader.__init__", "load_config"),
        Call(
            f"{LOADER}/default_loader.py",
            "DefaultModelLoader._prepare_weights",
            "model_name_or_path subfolder revision fall_back_to_pt allow_patterns_overrides",
        ),
        Has(
            f"{LOADER}/default_loader.py",
            "DefaultModelLoader",
            "local_expert_ids _encoder_only_lm_prefixes _encoder_only_weights_mapper "
            "counter_before_loading_weights",
        ),
        Has(
            f"{LOADER}/default_loader.py",
            "DefaultModelLoader.Source",
            "model_or_path revision subfolder prefix fall_back_to_pt allow_patterns_overrides "
            "is_unused_weight",
        ),
        Call(f"{LOADER}/default_loader.py", "DefaultModelLoader._get_weights_iterator", "source"),
        Same(
            f"{LOADER}/default_loader.py",
            "DefaultModelLoader._get_weights_iterator",
            "a2fe804e5b7e5ebf",
        ),
        Call("vllm/distributed/parallel_state.py", "get_tp_group", ""),
        Call("vllm/distributed/parallel_state.py", "model_parallel_is_initialized", ""),
        Has("vllm/distributed/parallel_state.py", "GroupCoordinator", "cpu_group"),
        Call(
            f"{LOADER}/ep_weight_filter.py",
            "should_skip_weight",
            "weight_name local_expert_ids",
        ),
        Call(f"{LOADER}/weight_utils.py", "enable_tqdm", "use_tqdm_on_load"),
        Call(
            f"{LOADER}/weight_utils.py",
            "filter_mm_encoder_only_safetensors_files",
            "hf_weights_files hf_folder index_file language_model_prefixes weights_mapper",
        ),
        Call(
            f"{LOADER}/weight_utils.py",
            "filter_safetensors_files_by_weight_name",
            "hf_weights_files is_unused_weight",
        ),
    ],
    "sglang": [
        Has(f"{SGLANG}/plugins/__init__.py", "", "GENERAL_PLUGINS_GROUP"),
        Has(f"{SGLANG}/plugins/hook_registry.py", "HookType", "AROUND"),
        Call(
            f"{SGLANG}/plugins/hook_registry.py", "HookRegistry.register", "target hook hook_type"
        ),
        Has(
            f"{SGLANG}/model_loader/loader.py",
            "",
            "safetensors_weights_iterator buffered_multi_thread_safetensors_weights_iterator",
        ),
        Says(
            f"{SGLANG}/model_loader/loader.py",
            "DefaultModelLoader._get_weights_iterator",
            "buffered_multi_thread_safetensors_weights_iterator(hf_weights_files",
        ),
        Says(
            f"{SGLANG}/model_loader/loader.py",
            "DefaultModelLoader._get_weights_iterator",
            "= safetensors_weights_iterator(hf_weights_files",
        ),
    ],
    "transformers": [
        Says(
            "transformers/modeling_utils.py",
            "PreTrainedModel.from_pretrained",
            "state_dict = kwargs.pop('state_dict', None)",
        ),
        Says("transformers/core_model_loading.py", "_materialize_copy", "tensor = tensor[...]"),
        Says("transformers/modeling_utils.py", "get_state_dict_dtype", "is_floating_point()"),
    ],
    "torch": [
        Call("torch/distributed/distributed_c10d.py", "_get_process_group_store", "pg"),
        Call("torch/distributed/distributed_c10d.py", "get_process_group_ranks", "group"),
        Has("torch/distributed/constants.py", "", "default_pg_timeout"),
        Has("torch/_C/_distributed_c10d.pyi", "Backend", "options _timeout"),
        Has("torch/_C/_distributed_c10d.pyi", "Store", "set get add check compare_set wait"),
        Has("torch/_C/_distributed_c10d.pyi", "ProcessGroup", "_get_backend _device_types"),
        Call(
            "torch/_C/_distributed_c10d.pyi",
            "ProcessGroupGloo.__init__",
            "store rank size timeout",
        ),
        Has(
            f"{DCP}/storage.py",
            "StorageReader",
            "reset read_metadata set_up_storage_reader prepare_local_plan prepare_global_plan "
            "read_data validate_checkpoint_id",
        ),
        Has(
            f"{DCP}/storage.py",
            "StorageWriter",
            "reset set_up_storage_writer prepare_local_plan prepare_global_plan write_data finish "
            "validate_checkpoint_id storage_meta",
        ),
        Has(f"{DCP}/storage.py", "WriteResult", "index size_in_bytes storage_data"),
        Has(
            f"{DCP}/planner.py",
            "ReadItem",
            "type dest_index dest_offsets storage_index storage_offsets lengths",
        ),
        Has(f"{DCP}/planner.py", "LoadPlan", "items storage_data"),
        Has(f"{DCP}/planner.py", "SavePlan", "items storage_data"),
        Has(f"{DCP}/planner.py", "WriteItem", "index type"),
        Has(f"{DCP}/planner.py", "WriteItemType", "BYTE_IO"),
        Has(f"{DCP}/planner.py", "LoadItemType", "BYTE_IO"),
        Call(f"{DCP}/planner.py", "LoadPlanner.resolve_tensor", "read_item"),
        Call(f"{DCP}/planner.py", "LoadPlanner.commit_tensor", "read_item tensor"),
        Call(f"{DCP}/planner.py", "SavePlanner.resolve_data", "write_item"),
        Has(
            f"{DCP}/metadata.py",
            "Metadata",
            "state_dict_metadata storage_data storage_meta version",
        ),
        Has(f"{DCP}/metadata.py", "TensorStorageMetadata", "properties size chunks"),
        Has(f"{DCP}/metadata.py", "ChunkStorageMetadata", "offsets sizes"),
        Has(f"{DCP}/metadata.py", "StorageMeta", "checkpoint_id save_id load_id"),
        Call(f"{DCP}/metadata.py", "MetadataIndex.__init__", "fqn offset"),
        Has(f"{DCP}/filesystem.py", "", "CURRENT_DCP_VERSION"),
        Has(
            f"{DCP}/filesystem.py",
            "_StorageInfo",
            "relative_path offset length transform_descriptors",
        ),
        Has(f"{DCP}/filesystem.py", "_StoragePrefix", "prefix"),
        Call(f"{DCP}/filesystem.py", "FileSystemReader.__init__", "path"),
        Call(f"{DCP}/filesystem.py", "FileSystemReader.read_data", "plan planner"),
        Call(f"{DCP}/filesystem.py", "FileSystemReader._get_metadata_path", "rank"),
        Has(f"{DCP}/filesystem.py", "FileSystemReader", "path load_id storage_data"),
        Call(f"{DCP}/filesystem.py", "FileSystemWriter.__init__", "path"),
        Call(f"{DCP}/filesystem.py", "_FileSystemWriter._get_metadata_path", "rank"),
        Has(
            f"{DCP}/filesystem.py",
            "_FileSystemWriter",
            "path rank use_collectives overwrite _metadata_exists",
        ),
        Same(f"{DCP}/filesystem.py", "_FileSystemWriter.finish", "a0946cd766a97684"),
        Same(f"{DCP}/filesystem.py", "_FileSystemWriter.prepare_local_plan", "f42ddfe54d6bc7d0"),
        Call(
            "torch/_utils.py",
            "_rebuild_tensor_v2",
            "storage storage_offset size stride requires_grad backward_hooks metadata",
        ),
        Call(
            "torch/_utils.py",
            "_rebuild_tensor_v3",
            "storage storage_offset size stride requires_grad backward_hooks dtype metadata",
        ),
    ],
}


def moved(package: str, read: Read) -> list[str]:
    """The changes of a package, one message each."""
    said = []
    for expected in EXPECTED[package]:
        try:
            expected.check(read)
        except Moved as error:
            said.append(str(error))
    return said


def newest(package: str, folder: Path) -> Path:
    """The newest wheel, downloaded."""
    # For a Python version for which all packages have wheels.
    only = ["--no-deps", "--only-binary=:all:", "--python-version=3.12"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        *only,
        "--dest",
        str(folder),
        package,
    ]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob(f"{package}-*.whl")
    return wheel


def text_of(archive: zipfile.ZipFile) -> Read:
    return lambda file: archive.read(file).decode()


def main(packages: list[str]) -> int:
    wrong = 0
    for package in packages or EXPECTED:
        with tempfile.TemporaryDirectory() as name:
            wheel = newest(package, Path(name))
            version = wheel.name.split("-")[1]
            with zipfile.ZipFile(wheel) as archive:
                said = moved(package, text_of(archive))
        for line in said:
            print(f"{package} {version}: {line}", flush=True)
        if not said:
            print(f"{package} {version}: all {len(EXPECTED[package])} as expected", flush=True)
        wrong += bool(said)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
