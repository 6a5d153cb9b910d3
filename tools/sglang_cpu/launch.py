"""SGLang's launch_server on a CPU build of torch; takes the same flags. Runs in the environment of sglang_cpu.sh."""

import os
import sys

import torch

# torchvision's compiled part can't load beside a CPU torch; its Python part only asks that these two operators exist.
# At the top of the file, since multiprocessing imports it anew in each process that SGLang spawns.
for _operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
