"""Whether a model can be fetched by its name. Without a network transformers retries for half a minute; `reach` finds
this out at once."""

from __future__ import annotations

import socket
import threading
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants

PATIENCE = 3.0  # seconds to wait for an answer of the hub's machine


def reach(name: str) -> dict[str, Any]:
    """The options with which transformers' from_pretrained finds this name at once. Raises a ValueError if it cannot.

    The machine of the hub, or that of the proxy, must accept a connection. If it does not, the model must be cached.
    """
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    elif _answers(constants.ENDPOINT):
        return {}
    else:
        reason = f"{constants.ENDPOINT} cannot be reached"
    if not _is_cached(name):
        raise ValueError(f"model: {name!r} is neither a folder nor in the cache, and {reason}")
    return {"local_files_only": True}


def _is_cached(name: str) -> bool:
    try:
        return isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # not a name that the hub could have: transformers says what is wrong with it
        return True


def _answers(endpoint: str) -> bool:
    """Whether the machine of this address, or of the proxy for it, accepts a connection."""
    address = urlsplit(endpoint)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    found: list[bool] = []

    def connect() -> None:
        port = address.port or (80 if address.scheme == "http" else 443)
        try:
            socket.create_connection((address.hostname or "", port), timeout=PATIENCE).close()
            found.append(True)
        except OSError:
            found.append(False)

    # In a thread: looking up the name of a machine has no time-out.
    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return bool(found and found[0])
