"""Folder for the `PYTHONPATH` of a vLLM server; see `kintsugi_vllm`."""
