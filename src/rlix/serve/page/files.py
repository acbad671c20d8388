"""The files that the page is made of: its own, and those that it shares with the report of a run."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_REPORT = ("report.css", "common.js", "timeline.js", "curves.js")
_OWN = ("page.html", "page.css", "page.js", "icon.svg")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Nothing is loaded from elsewhere, no text of a job becomes a script, and no other page can frame this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page has no cookies: the user's token is in each request's header, put there by its script, so that no other
page can have the browser ask in the user's name."""


def page_routes() -> list[Route]:
    """ "/" is the page; what it shows it asks of the API, with the token of who looks."""
    found = [("rlix.monitor", name) for name in _REPORT] + [("rlix.serve.page", name) for name in _OWN]
    texts = {name: (files(package) / "assets" / name).read_text(encoding="utf-8") for package, name in found}
    routes = [_route(f"/page/{name}", name, text) for name, text in texts.items()]
    return [_route("/", "page.html", texts["page.html"]), *routes]


def _route(path: str, name: str, text: str) -> Route:
    async def answer(_: Request) -> Response:
        return Response(text, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)

    return Route(path, answer)
