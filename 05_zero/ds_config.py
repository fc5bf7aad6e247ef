"""Makes DeepSpeed's config of ds_config.json and the flags, and finds its mistakes before the first collective.

DeepSpeed ignores a key that it does not know, if it stands outside the blocks: "gradient_cliping": 0.5 clips at 1.0,
its default. Here such a key is an error, like everything that stands in the file and in the flags and differs.
"""

import json
import sys
from difflib import get_close_matches
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the repository root, searched last
from common.process_group import UsageError  # copied this folder out? copy common/ beside it or into it

# What DeepSpeedConfig of deepspeed/runtime/config.py (0.19.8) reads at the top of the file; a test compares.
KNOWN_KEYS = """
activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile
csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc
dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown optimizer pipeline
prescale_gradients scheduler seq_parallel_communication_data_type sequence_parallel_size steps_per_print
tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
# What DeepSpeed had once: key -> the way out. Its own list is in the same file.
GONE = "compression_training eigenvalue graph_harvesting nebula progressive_layer_drop quantize_training"
REMOVED = {
    "amp": 'use "bf16", "fp16" or "torch_autocast"',
    "curriculum_learning": 'use "data_efficiency": {"data_sampling": {"curriculum_learning": ..}}',
    "elasticity": "use --batch and --microbatch",
    "sparse_attention": "use torch.nn.attention.flex_attention in the model",
    "sparse_gradients": "leave it out: nn.Embedding(sparse=True) needs no key",
}
REMOVED_ZERO = {
    "cpu_offload_params": 'use "offload_param": {"device": "cpu"}',
    "mics_hierarchical_params_gather": 'use "zero_hpz_partition_size" to shard inside a node',
    "mics_shard_size": 'use "zero_hpz_partition_size" to shard inside a node',
    "zeropp_loco_param": 'use "zero_quantized_gradients" without it',
}


def read_config(path):
    """Returns the JSON file's dict. DeepSpeed's own reader allows comments, too; plain JSON every tool can read."""

    def refuse_twice(pairs):
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f'--config {path}: "{twice[0]}" stands there twice: leave out one')
        return dict(pairs)

    try:
        config = json.loads(Path(path).read_text(), object_pairs_hook=refuse_twice)
    except json.JSONDecodeError as error:
        what = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise UsageError(f"--config {path} is no JSON: {what}; comments are not allowed") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}; name a file with DeepSpeed's JSON") from None
    if not isinstance(config, dict):
        raise UsageError(f"--config {path} holds a {type(config).__name__}: use an object, {{..}}")
    return config


def check_keys(path, block, given, known, removed):
    """Refuses what DeepSpeed does not know, or knows no more; block: the words that name the place."""
    for key in given:
        if key in removed:
            raise UsageError(f'--config {path}: DeepSpeed removed "{key}"{block}: {removed[key]}')
        if key not in known:
            close = get_close_matches(key, known, 1)
            way_out = f'did you mean "{close[0]}"?' if close else "leave it out"
            raise UsageError(f'--config {path}: DeepSpeed has no "{key}"{block}: {way_out}')


def check_config(path, config, args, world_size):
    """Refuses a file that contradicts itself or the flags."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    removed = dict.fromkeys(GONE.split(), "it has no successor, leave it out") | REMOVED
    check_keys(path, "", config, KNOWN_KEYS.split(), removed)
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise UsageError(f'--config {path}: "zero_optimization" is no object: use {{"stage": 3}}')
    fields = DeepSpeedZeroConfig.model_fields
    known = {*fields, *(field.alias for field in fields.values() if field.alias)}
    check_keys(path, " in zero_optimization", zero, known, REMOVED_ZERO)
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise UsageError(f'--config {path}: "stage" {zero["stage"]} must be 0, 1, 2 or 3: leave it to --stage')
    if "optimizer" in config:  # DeepSpeed would take the script's and not say so
        raise UsageError(f'--config {path} names an "optimizer", the script gives one: leave it to --lr and --fused')
    if {"bf16", "bfloat16"} <= config.keys():
        raise UsageError(f'--config {path} has "bf16" and "bfloat16", one by two names: leave it to --dtype bfloat16')
    blocks = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}
    enabled = [name for name in blocks if isinstance(config.get(name), dict) and config[name].get("enabled")]
    if len(enabled) > 1:
        raise UsageError(f"--config {path} enables {' and '.join(enabled)}: use one of them, by --dtype")
    if enabled and blocks[enabled[0]] != args.dtype:
        raise UsageError(f"--config {path} enables {enabled[0]}: use --dtype {blocks[enabled[0]]}, not {args.dtype}")
    sizes = {name: config.get(name) for name in batch_sizes(args, world_size)}
    if "auto" in sizes.values():
        raise UsageError(f'--config {path}: "auto" is the transformers Trainer\'s word: leave the batch sizes out')
    total, micro, steps = sizes.values()
    if all(isinstance(size, int) for size in sizes.values()) and total != micro * steps * world_size:
        wrong = f"train_batch_size {total} is not {micro} x {steps} x {world_size} ranks = {micro * steps * world_size}"
        raise UsageError(f"--config {path}: {wrong}: leave them out, --batch and --microbatch give all three")
    for name, value in (batch_sizes(args, world_size) | {"gradient_clipping": args.clip}).items():
        if config.get(name, value) != value:
            flag = "--clip" if name == "gradient_clipping" else "--batch and --microbatch"
            raise UsageError(f"--config {path} has {name} {config[name]}, {flag} say {value}: leave it out of the file")


def batch_sizes(args, world_size):
    """Returns DeepSpeed's three batch sizes; the first must be the product of the others and the ranks."""
    steps = args.batch // world_size // args.microbatch
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return dict(zip(names, (args.batch, args.microbatch, steps)))


def make_config(args, world_size, pin_memory):
    """Returns the config as a dict: the file, and over it the flags. Sets args.stage where no flag does."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = read_config(args.config)
    check_config(args.config, config, args, world_size)
    zero = config["zero_optimization"] = dict(config.get("zero_optimization", {}))
    args.stage = zero["stage"] = zero.get("stage", 0) if args.stage is None else args.stage
    if args.bucket_size is not None and args.bucket_size < 1:
        raise UsageError(f"--bucket-size {args.bucket_size} must be above 0: it counts elements")
    buckets = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
    zero |= dict.fromkeys(buckets, args.bucket_size) if args.bucket_size else {}
    zero |= {"overlap_comm": False} if args.no_overlap else {}
    if args.offload:
        if args.stage == 0:
            raise UsageError(f"--offload {args.offload} needs what ZeRO has split: use --stage 1, 2 or 3, not 0")
        for what in ("offload_optimizer", "offload_param")[: 2 if args.stage == 3 else 1]:
            zero[what] = dict(device="cpu", pin_memory=pin_memory)
    if args.dtype == "float64":  # its masters are float32, and it all-reduces no float64 gradient
        raise UsageError("--dtype float64 is nothing that DeepSpeed trains: use float32, or from_scratch.py")
    if args.fused and args.stage == 0:
        raise UsageError("--fused steps the flat parts that ZeRO makes: use --stage 1, 2 or 3, not 0")
    if "16" in args.dtype:
        block = "fp16" if args.dtype == "float16" else "bfloat16" if "bfloat16" in config else "bf16"
        config[block] = config.get(block, {}) | {"enabled": True}
    config["zero_force_ds_cpu_optimizer"] = False  # --offload cpu goes with torch's AdamW, which needs no compiler
    config |= batch_sizes(args, world_size) | {"gradient_clipping": args.clip}
    try:
        DeepSpeedConfig(config)  # what is left: a value of the wrong kind, a key inside another block
    except Exception as error:
        raise UsageError(f"--config {args.config}: DeepSpeed refuses it: {' '.join(str(error).split()):.300}") from None
    return config
