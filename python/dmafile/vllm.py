"""The plug-in of vLLM: `--load-format dmafile`."""


def register() -> None:
    """Registers the load format; vLLM calls this in each of its processes.

    Nothing is imported before that, and nothing is raised: if this vLLM cannot use the loader, a
    warning is logged, and the load format does not exist.
    """
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from ._vllm import Loader

        register_model_loader("dmafile")(Loader)
    except Exception as error:
        import logging

        text = "no load format dmafile in this vLLM: %s: %s"
        logging.getLogger("dmafile").warning(text, type(error).__name__, error)
