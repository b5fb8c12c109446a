"""The `hetkv` command. Heavy libraries are imported only by the subcommand that needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_MODELS = ("deepseek_v4", "gpt_oss", "gemma3")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hetkv", description="A typed KV-cache allocator for hybrid-attention models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="serve a multi-turn load on tiny models and check every answer",
        description="Serves a multi-turn load on tiny random-weight models, cold and through hetkv, compares every answer, and "
        "provokes the usual faults. Exits with 1 if any output differed.",
    )
    demo.add_argument("--model", choices=(*_MODELS, "all"), default="all", help="which model (default: all)")
    demo.add_argument("--turns", type=_positive, metavar="N", help="requests per model (default: 10)")
    demo.add_argument("--capacity", metavar="SIZE", help='arena per model, e.g. "2MiB" (default: too little for the whole load)')
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and load (default: 0)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    demo.add_argument("--attach", action="store_true", help="compute on hetkv's blocks instead of copying, and compare the speed")
    demo.add_argument(
        "--store", type=Path, metavar="DIR", help="keep prefixes in this folder: a second run of the same command starts warm"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from .demo.main import DEFAULT_TURNS, DemoOptions, run_demo  # noqa: PLC0415
    except ModuleNotFoundError as error:
        print(f"hetkv demo needs {error.name}: pip install 'hetkv[demo]'", file=sys.stderr)
        return 2
    return run_demo(
        DemoOptions(
            models=_MODELS if arguments.model == "all" else (arguments.model,),
            turns=arguments.turns or DEFAULT_TURNS,
            capacity=arguments.capacity,
            seed=arguments.seed,
            json_path=arguments.json,
            attach=arguments.attach,
            store=arguments.store,
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. `arguments`: without the program's name; default: `sys.argv`."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.command == "demo" and parsed.attach and parsed.store is not None:
        parser.error("--store is for the demo that copies: not with --attach")
    try:
        return {"demo": _demo}[parsed.command](parsed)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
