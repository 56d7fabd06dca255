"""The plug-in of vLLM: `--load-format dmafile`."""


def register() -> None:
    """Tells vLLM of the load format; vLLM calls it in each of its processes.

    Nothing is imported before then, and nothing is raised: where this vLLM cannot take the loader
    there is a warning, and no such load format.
    """
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from ._vllm import Loader

        register_model_loader("dmafile")(Loader)
    except Exception as error:
        import logging

        text = "no load format dmafile in this vLLM: %s: %s"
        logging.getLogger("dmafile").warning(text, type(error).__name__, error)
