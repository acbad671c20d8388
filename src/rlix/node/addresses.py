"""This machine's addresses and what they belong to."""

import os

import psutil


def host_name() -> str:
    """What this machine calls itself."""
    return os.uname().nodename


def interface_of(address: str) -> str | None:
    """The network interface that has `address`; None where none has."""
    found = psutil.net_if_addrs().items()
    return next((name for name, places in found if address in {place.address for place in places}), None)


def name_interface(address: str) -> None:
    """Have gloo's groups of this process listen at `address`, whatever the host's own name resolves to.

    "lo" is what a process inherits in which groups of one node were made; another name is its user's.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME", "lo") == "lo" and (interface := interface_of(address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
