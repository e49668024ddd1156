"""Where a deployment's API lives: base URLs as people write them."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass, field

from agentx.errors import InputError

_CREDENTIALS = re.compile(r"(?<=//)[^/?#]*@|^[^/?#]*@")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a deployment's API lives: `prefix` is what stands before `/v1`."""

    scheme: str
    host: str
    port: int
    prefix: str = ""
    userinfo: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """The endpoint of a base URL, given with or without scheme, `/v1` and trailing slash.

        Raises InputError where it is no HTTP URL.
        """
        text = url.strip()
        shown = _CREDENTIALS.sub("***@", text)
        try:
            parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port
        except ValueError:
            raise InputError(f"--url {shown!r} has no valid host or port", "write http://HOST:PORT") from None
        if not text.isascii():
            raise InputError(f"--url {shown!r} has letters beyond ASCII", "write them as %XX, a host name as xn--…")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"--url {shown!r} is no HTTP URL", "write http://HOST:PORT or https://HOST/PATH")
        if parts.query or parts.fragment:
            raise InputError(f"--url {shown!r} has a query or fragment", "give the base URL only")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        userinfo = parts.netloc.rpartition("@")[0]
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), prefix, userinfo)

    @property
    def authority(self) -> str:
        """`host:port` as in a Host header; the default port is left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"

    def url(self, path: str = "") -> str:
        """The full URL of `path` under the prefix, without credentials."""
        return f"{self.scheme}://{self.authority}{self.prefix}{path}"
