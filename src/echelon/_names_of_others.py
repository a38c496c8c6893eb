"""Names of other libraries that `echelon` lacks at its top, each with advice. Pure."""

from __future__ import annotations

_METHODS = (
    *(
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "gather",
        "reduce_scatter",
        "scatter",
        "all_to_all",
        "barrier",
    ),
    *("all_gather_object", "broadcast_object", "gather_object", "scatter_object", "print"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)
_OF_GROUP = {
    **{name: f"{name}()" for name in _METHODS},
    **{"allreduce": "all_reduce()", "allgather": "all_gather()", "alltoall": "all_to_all()", "bcast": "broadcast()"},
    **{"broadcast_object_list": "broadcast_object()", "new_group": "subgroup(ranks)", "split": "subgroup(ranks)"},
    **dict.fromkeys(("rank", "get_rank", "process_index"), "rank"),
    **dict.fromkeys(("size", "world_size", "get_world_size", "num_processes"), "world_size"),
    "device": "device",
}
_OF_MODULES = {
    "amp": ("GradScaler",),
    "checkpoint": ("Store",),
    "data": ("DataLoader", "DistributedSampler"),
    "logging": ("MetricsWriter", "RankFilter", "progress"),
    "pipeline": ("Costs", "Pipeline", "Schedule", "keyed", "schedules"),
}
MEANT = {
    **{name: f" write group.{member}, with group = echelon.init()" for name, member in _OF_GROUP.items()},
    **{name: f"echelon.{module}.{name}" for module, names in _OF_MODULES.items() for name in names},
    **dict.fromkeys(
        ("local_rank", "get_local_rank"), " it is in the environment, as LOCAL_RANK, and chooses group.device"
    ),
    **dict.fromkeys(("init_process_group", "initialize", "COMM_WORLD", "get_world_group"), "echelon.init()"),
    **dict.fromkeys(
        ("is_initialized", "is_available"), " echelon.init() returns a group always, of one rank without a launcher"
    ),
    **dict.fromkeys(
        ("destroy_process_group", "shutdown", "finalize"), " the group ends with the program, or by group.close()"
    ),
    **dict.fromkeys(("device_mesh", "init_device_mesh", "DeviceMesh"), "echelon.Mesh"),
    **dict.fromkeys(
        ("FSDP", "FullyShardedDataParallel", "fully_shard"),
        " echelon.ZeroOptimizer shards the optimizer's state; torch's fully_shard runs under the backend of "
        "echelon.interop.torch_distributed",
    ),
    **dict.fromkeys(
        ("DistributedOptimizer", "ZeroRedundancyOptimizer"),
        " echelon.DDP averages gradients, and echelon.ZeroOptimizer shards an optimizer's state",
    ),
    **dict.fromkeys(
        ("broadcast_parameters", "broadcast_optimizer_state"), " echelon.DDP copies the model of rank 0 to all ranks"
    ),
    **dict.fromkeys(
        ("Trainer", "Accelerator", "Fabric", "prepare"),
        " there is no trainer: wrap the model, as echelon.DDP(model, group), and write the loop",
    ),
    **dict.fromkeys(
        ("save", "load", "save_checkpoint", "load_checkpoint"), " make a store = echelon.checkpoint.Store(folder) first"
    ),
    **dict.fromkeys(("ReduceOp", "Sum", "Average"), " give the operation as text, such as op='avg'"),
    **dict.fromkeys(("seed_everything", "manual_seed"), " call torch.manual_seed"),
    "run": "echelon.spawn",
}
"""Names that other libraries have at their top, or that Echelon has elsewhere, as `no_attribute` takes them."""
