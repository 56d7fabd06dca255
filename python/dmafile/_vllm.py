"""The loader of vLLM's load format `dmafile`."""

import time
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group, model_parallel_is_initialized
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import (
    enable_tqdm,
    filter_mm_encoder_only_safetensors_files,
    filter_safetensors_files_by_weight_name,
)

from . import _dmafile
from ._errors import Error
from .torch import stream

_logger = init_logger(f"vllm.{__name__}")


class Extra(NamedTuple):
    """The options of `--model-loader-extra-config`."""

    budget: int = 1 << 30
    verify: str | None = None
    share: str | None = None
    weights: str | None = None

    @classmethod
    def of(cls, said: Any) -> Self:
        """Checks the options; raises a ValueError that names the invalid one."""
        if not isinstance(said, dict):
            raise ValueError(f"model_loader_extra_config: {said!r} is not a dictionary")
        if unknown := sorted(map(str, said.keys() - set(cls._fields))):
            known = ", ".join(cls._fields)
            raise ValueError(
                f"model_loader_extra_config: the load format dmafile has no {', '.join(unknown)}; "
                f"it has {known}"
            )
        extra = cls(**said)
        if type(extra.budget) is not int or extra.budget < 1:
            text = f"budget: {extra.budget!r} is not a number of bytes, 1 or more"
            raise ValueError(f"model_loader_extra_config: {text}")
        if not isinstance(extra.verify, str | None):
            text = f"verify: {extra.verify!r} is not a checksum such as 'sha256'"
            raise ValueError(f"model_loader_extra_config: {text}")
        if extra.share not in (None, "off", "node"):
            text = f"share: {extra.share!r} is not 'off' or 'node'"
            raise ValueError(f"model_loader_extra_config: {text}")
        if not isinstance(extra.weights, str | None):
            text = f"weights: {extra.weights!r} is not a URL such as 's3://bucket/model/'"
            raise ValueError(f"model_loader_extra_config: {text}")
        return extra


class Loader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loader, with another method of reading safetensors files. It skips the same
    weights."""

    # When vLLM began to load weights, for its log.
    counter_before_loading_weights: float = 0.0

    def __init__(self, load_config: Any) -> None:
        self._extra = Extra.of(load_config.model_loader_extra_config or {})
        # With a format and keys that vLLM's loader supports.
        known = copy(load_config)
        known.load_format, known.model_loader_extra_config = "safetensors", {}
        super().__init__(known)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        # What vLLM itself sets if the model is an s3:// or gs:// URL; then it has only fetched the
        # small files. The key is for the main model, not for a draft of it.
        url = getattr(model_config, "model_weights", "")
        main = get_current_vllm_config().model_config
        if "://" not in url and main is not None and main.model == model_config.model:
            url = self._extra.weights
        self._model, self._url = model_config.model, url
        weights: Iterator[tuple[str, Any]] = super().get_all_weights(model_config, model)
        return weights

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        if self._url and source.model_or_path == self._model:
            return self._stream(self._url, source.prefix)
        if self.load_config.safetensors_load_strategy == "torchao":
            # These tensors are assembled from several.
            whole: Iterator[tuple[str, Any]] = super()._get_weights_iterator(source)
            return whole
        folder, files, _, index = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if self._encoder_only_lm_prefixes is not None:
            files = filter_mm_encoder_only_safetensors_files(
                files,
                folder,
                index,
                self._encoder_only_lm_prefixes,
                weights_mapper=self._encoder_only_weights_mapper,
            )
        if source.is_unused_weight is not None:
            files = filter_safetensors_files_by_weight_name(files, source.is_unused_weight)
        if not files:
            raise RuntimeError(f"no file of {source.model_or_path} has weights that are needed")
        return self._stream(sorted(files), source.prefix)

    def _stream(self, files: str | list[str], prefix: str) -> Iterator[tuple[str, Any]]:
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        weights = stream(
            files,
            tensors=self._is_wanted if self.local_expert_ids is not None else None,
            budget=self._extra.budget,
            verify=self._extra.verify,
            progress=bool(enable_tqdm(self.load_config.use_tqdm_on_load)),
            group=self._group(),
            report=_log,
        )
        return ((prefix + name, tensor) for name, tensor in weights)

    def _group(self) -> Any:
        """The ranks that load together: those of tensor parallelism, which need the same files."""
        if self._extra.share == "off" or not model_parallel_is_initialized():
            return None
        group = get_tp_group().cpu_group
        return group if self._extra.share == "node" or _can_share(group) else None

    def _is_wanted(self, name: str) -> bool:
        return not should_skip_weight(name, self.local_expert_ids)


def _can_share(group: Any) -> bool:
    """True if all of these ranks have a place for sockets; otherwise each loads on its own."""
    able = True
    try:
        _dmafile.place()
    except Error as error:
        able = False
        _logger.warning("Each rank reads the weights on its own, as with share=off: %s", error)
    all_able = torch.tensor(int(able))
    dist.all_reduce(all_able, dist.ReduceOp.MIN, group=group)
    return bool(all_able.item())


def _log(report: dict[str, Any]) -> None:
    ranks, nodes = report["ranks"], report["nodes"]
    if len(ranks) > 1 and ranks[0]["rank"] == dist.get_rank():
        disk = sum(one["disk"] for one in ranks)
        text = "Weights of %d ranks on %d nodes: %d bytes were read from files"
        _logger.info(text, len(ranks), len(nodes), disk)
