"""vLLM in this process, on two cores, without the network; where vLLM is missing, nothing here is collected."""

import importlib.util
import os

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: tests look into it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
