# SPDX-License-Identifier: MIT
"""The expert cache's options on the command line."""

import argparse
from pathlib import Path

from pyhobbit.settings.config import CacheConfig, parse_size


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the expert cache; cache_config() takes the parsed arguments."""
    group = parser.add_argument_group("expert cache")
    add = group.add_argument
    add("--memory", metavar="SIZE", help="of the process, like 8G (default: what is free)")
    add("--pools", metavar="SIZE", help="of the expert pools alone, like 512M")
    add("--t1", type=float, metavar="F", help="high precision up to this sum of gate weights, 0 to 1")
    add("--t2", type=float, metavar="F", help="low precision from t1 to here, skipped above it")
    add("--low-share", type=float, metavar="F", help="of the pools, for the low tier (default: by t1)")
    add("--policy", metavar="NAME", help="of eviction (default: calibrated, or echo)")
    add("--prefetch", type=int, metavar="N", help="layers ahead, 0 to 4 (default: 2)")
    add("--sidecar", type=Path, metavar="FILE", help="with the low tier (default: MODEL.hobbit.gguf)")
    add("--trace", type=Path, metavar="FILE", help="write the routing here, for pyhobbit simulate")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the devices that compute the experts; cache_config() takes them too."""
    add = parser.add_argument_group("device").add_argument
    add(
        "--device",
        metavar="NAME,...",
        help="that compute the experts, like Vulkan0 (default: where the other layers are)",
    )
    add("--device-memory", metavar="SIZE", help="of those devices, for experts (default: what is free)")
    what = "what the CPU computes of experts that are not there: none, all, what is faster (default: auto)"
    add("--mode", metavar="|".join(CacheConfig.modes), help=what)


def add_rpc_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the servers of further devices, which add_rpc_devices() adds."""
    what = "further devices, RPC0 and so on: those of ggml-rpc-server there"
    parser.add_argument("--rpc", metavar="HOST:PORT,...", help=what)


def add_rpc_devices(args: argparse.Namespace) -> None:
    """Before anything is opened. Raises ConfigError, HobbitError."""
    if args.rpc is not None:
        from pyhobbit.native.ffi import llama  # loads the native libraries
        from pyhobbit.native.rpc_servers import add_rpc_servers

        llama.llama_backend_init()
        add_rpc_servers(args.rpc)


def cache_config(args: argparse.Namespace) -> CacheConfig:
    """What the options say. Raises ConfigError."""
    return CacheConfig(
        memory=optional_size(args.memory),
        pools=optional_size(args.pools),
        device=args.device,
        device_memory=optional_size(args.device_memory),
        mode=args.mode,
        low_share=args.low_share,
        t1=args.t1,
        t2=args.t2,
        sidecar=args.sidecar,
        policy=args.policy,
        prefetch=args.prefetch,
        trace=args.trace,
    )


def declared_options(parser: argparse.ArgumentParser) -> dict[str, int]:
    """By each name of each option, how many values it takes: 0 or 1. argparse has no public way to ask."""
    return {name: int(action.nargs != 0) for action in parser._actions for name in action.option_strings}


def optional_size(text: str | None) -> int | None:
    """Bytes, where a size is given. Raises ConfigError."""
    return None if text is None else parse_size(text)
