"""Small servers that speak as vLLM and SGLang do, for tests of the back ends. They break on demand.

Their model: the next token is the sum of all tokens so far plus a number that the weights hold, in the vocabulary.
Token t has the logit -t: log-probabilities are not normalised, but scale with the temperature as real ones do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from aiohttp import web
from safetensors.torch import load_file

VOCAB_SIZE = 40
MAX_LENGTH = 64
_WEIGHT_PATHS = ("/collective_rpc", "/update_weights", "/update_weights_from_disk")


def next_token(tokens: list[int], *, offset: int) -> int:
    return (sum(tokens) + offset) % VOCAB_SIZE


def logprob(token: int, temperature: float) -> float:
    return -token / (temperature or 1.0)


class Order(NamedTuple):
    """A request for tokens, as the fake model understands it."""

    name: str
    tokens: list[int]
    temperature: float
    max_new_tokens: int
    ends: list[int]
    num_top: int


class Sampled(NamedTuple):
    token: int
    logprob: float
    tops: list[tuple[int, float]]
    finish: str | None
    label: str


class FakeServer:
    """Runs in a thread of its own while the `with` block lasts."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.release_after = MAX_LENGTH
        """A stream stands still after so many tokens, until `released`."""
        self.sees_memory = True
        self.keeps = ""
        """A parameter that keeps its old values."""
        self.num_deaf = 0
        """So many streams go on when all are to end."""
        self.label = "default"
        self.reports_aborts = True
        self.scales = True
        self.orders: list[Order] = []
        self.calls: list[str] = []
        self.most_running = 0
        self.weights: dict[str, torch.Tensor] = {}
        self.app = web.Application(middlewares=[self._note])
        self._running: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.url = self._call(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    def close(self) -> None:
        """Nobody answers at its address any more."""
        self._call(self._runner.cleanup())

    def forget(self) -> None:
        """Have the label of a server that has just started."""
        self.label = "default"

    @property
    def offset(self) -> int:
        return int(self.weights["model.norm.weight"][0]) if self.weights else 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> str:
        self._runner = web.AppRunner(self.app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _stop(self) -> None:
        self._released.set()
        await self._runner.cleanup()

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> Any:
        self.calls.append(request.path)
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if self.fault == "takes no weights" and request.path in _WEIGHT_PATHS:
            return web.Response(status=500)
        return await handler(request)

    def load(self, path: Path) -> None:
        if self.fault == "forgets weights":
            return
        assert self.sees_memory or not path.is_symlink()
        kept = {self.keeps: self.weights[self.keeps]} if self.keeps else {}
        self.weights = load_file(path) | kept

    def abort(self, name: str | None = None) -> None:
        spared = list(self._running)[: self.num_deaf] if name is None else []
        for each, aborted in self._running.items():
            if name in (None, each) and each not in spared:
                aborted.set()

    async def sample(self, order: Order) -> AsyncIterator[Sampled | None]:
        """None where it was aborted."""
        self.orders.append(order)
        aborted = self._running[order.name] = asyncio.Event()
        self.most_running = max(self.most_running, self.num_running)
        scale = order.temperature if self.scales else 1.0
        tokens = list(order.tokens)
        try:
            for count in range(1, order.max_new_tokens + 1):
                if count > self.release_after:
                    await self._wait_for_one(aborted, self._released)
                await self._wait_for_one(aborted, self._thawed)
                if aborted.is_set():
                    yield None
                    return
                token = next_token(tokens, offset=self.offset)
                tokens.append(token)
                finish = (
                    "stop" if token in order.ends else "length" if count == order.max_new_tokens else None
                )
                tops = [(each, logprob(each, scale)) for each in range(order.num_top)]
                if finish:
                    self._running.pop(order.name)
                yield Sampled(token, logprob(token, scale), tops, finish, self.label)
                if finish:
                    return
                await asyncio.sleep(0)
        finally:
            self._running.pop(order.name, None)

    async def _wait_for_one(self, *events: asyncio.Event) -> None:
        if any(event.is_set() for event in events):
            return
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    async def stream(
        self, request: web.Request, order: Order, event: Callable[..., Any]
    ) -> web.StreamResponse:
        if self.fault == "refuses":
            return web.json_response({"error": {"message": "too clever", "code": 400}}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if self.fault == "refuses late":
            await response.write(b'data: {"error": {"message": "too late", "code": 400}}\n\ndata: [DONE]\n\n')
            return response
        so_far: list[Sampled] = []
        async for sampled in self.sample(order):
            if sampled is not None:
                so_far.append(sampled)
            elif not self.reports_aborts:
                break
            data = json.dumps(event(so_far, sampled))
            await response.write(f"data: {data}\n\n".encode())
            if self.fault == "dies" and len(so_far) == 2:
                assert request.transport is not None
                request.transport.abort()
        await response.write(b"data: [DONE]\n\n")
        return response


class FakeVllm(FakeServer):
    """As of vLLM 0.32 with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, with or without the plugin; without labels
    as of 0.25."""

    def __init__(
        self, *, dev_mode: bool = True, scale_out: bool = True, plugin: bool = True, labels: bool = True
    ) -> None:
        super().__init__()
        self.has_labels = self.reports_aborts = labels
        self.scale_out = scale_out
        self.has_plugin = plugin
        self.is_updating = False
        self.salts: list[str] = []
        self.cleared: list[bool] = []
        """Per pause, whether the KV cache of running requests was given up."""
        self.receipt: dict[str, Any] = {
            "reads_memory": False,
            "label": "",
            "digests": {},
            "num_equal": 0,
            "num_split": 0,
            "num_repacked": 0,
            "different": [],
        }
        routes = [
            web.get("/health", self._ok),
            web.get("/v1/models", self._models),
            web.post("/inference/v1/generate", self._generate),
        ]
        if dev_mode and labels:
            routes += [
                web.get("/weight_info", self._weight_info),
                web.post("/update_weight_version", self._update_weight_version),
                web.post("/weight_checker", self._weight_checker),
            ]
        if dev_mode:
            routes += [
                web.get("/is_paused", self._ok),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/collective_rpc", self._collective_rpc),
                web.post("/init_weight_transfer_engine", self._init_weight_transfer_engine),
                web.post("/start_weight_update", self._start_weight_update),
                web.post("/update_weights", self._update_weights),
                web.post("/finish_weight_update", self._finish_weight_update),
            ]
        self.app.add_routes(routes)

    def forget(self) -> None:
        super().forget()
        self.receipt |= {"label": ""}

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model", "max_model_len": MAX_LENGTH}]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _pause(self, request: web.Request) -> web.Response:
        if request.query["mode"] == "abort":
            self.abort()
        else:
            assert request.query["mode"] == "keep"
            self._thawed.clear()
            self.cleared.append(request.query["clear_cache"] == "true")
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._thawed.set()
        return web.json_response({"status": "resumed"})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "kintsugi_receipt":
            return web.json_response({"results": [self.receipt]})
        assert body["method"] == "reload_weights"
        self.load(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        return web.json_response({"results": [None]})

    async def _init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        if not self.has_plugin:
            return web.Response(status=500)
        info = (await request.json())["init_info"]
        assert _content(info["path"]).decode() == info["content"]
        self.receipt["reads_memory"] = self.sees_memory
        return web.json_response({})

    async def _start_weight_update(self, request: web.Request) -> web.Response:
        if self.is_updating:
            return web.Response(status=500)
        self.is_updating = True
        self.receipt |= {"label": "", "digests": {}, "num_equal": 0, "different": []}
        return web.json_response({})

    async def _update_weights(self, request: web.Request) -> web.Response:
        """Withheld, it answers like one that happened."""
        if self.fault == "withholds weights":
            return web.json_response({})
        info = (await request.json())["update_info"]
        (path,) = info["paths"]
        assert path.startswith("/proc/") == self.sees_memory and info["parts"]
        self.load(Path(path))
        expected = load_file(path)
        self.receipt["label"] = info["label"]
        self.receipt["digests"] = {path: hashlib.sha256(_content(path)).hexdigest()}
        same = [name for name in expected if torch.equal(expected[name], self.weights[name])]
        self.receipt |= {"num_equal": len(same), "different": [name for name in expected if name not in same]}
        return web.json_response({})

    async def _finish_weight_update(self, request: web.Request) -> web.Response:
        self.is_updating = False
        self.label = (await request.json())["weight_version"] or self.label
        return web.json_response({})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _weight_checker(self, request: web.Request) -> web.Response:
        tensors = dict(self.weights)
        for fused, parts in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ):
            for name in [name for name in tensors if f".{parts[0]}." in name]:
                together = [tensors.pop(name.replace(parts[0], part)) for part in parts]
                tensors[name.replace(parts[0], fused)] = torch.cat(together)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            padding = tensors[name].new_zeros(-VOCAB_SIZE % 64, tensors[name].shape[1])
            tensors[name] = torch.cat([tensors[name], padding])
        digests = {
            f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }
        return web.json_response({"checksums": digests})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return web.json_response({"error": "disabled"}, status=403)
        if not request.can_read_body:
            return web.json_response({"error": "no body"}, status=422)
        body = await request.json()
        self.salts.append(body["cache_salt"])
        sampling = body["sampling_params"]
        order = Order(
            body["request_id"],
            body["token_ids"],
            sampling["temperature"],
            sampling["max_tokens"],
            sampling["stop_token_ids"],
            sampling["logprobs"],
        )
        return await self.stream(request, order, self._event)

    def _event(self, so_far: list[Sampled], new: Sampled | None) -> Any:
        content = []
        if new is not None and self.fault != "drops logprobs":
            tops = [{**self._named(token), "logprob": value} for token, value in new.tops]
            content = [{**self._named(new.token), "logprob": new.logprob, "top_logprobs": tops}]
        finish = "abort" if new is None else new.finish
        has_spans = self.has_labels and finish and so_far
        spans = _spans([each.label for each in so_far]) if has_spans else None
        choice = {
            "index": 0,
            "finish_reason": finish,
            "token_ids": [new.token] if new else [],
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        return {"request_id": "generate-tokens-x", "choices": [choice]}

    def _named(self, token: int) -> dict[str, Any]:
        named: dict[str, Any] = {"token": f"token_id:{token}"}
        return named | {"token_id": token} if self.has_labels else named


def _content(path: str) -> bytes:
    return Path(path).read_bytes()


def _spans(labels: list[str]) -> list[dict[str, Any]]:
    """Of tokens in sequence."""
    starts = [place for place in range(len(labels)) if not place or labels[place] != labels[place - 1]]
    ends = [*starts[1:], len(labels)]
    return [
        {"version": labels[start], "start": start, "end": end}
        for start, end in zip(starts, ends, strict=True)
    ]


class FakeSGLang(FakeServer):
    """As of SGLang 0.5, with or without --incremental-streaming-output."""

    def __init__(self, *, incremental: bool = False) -> None:
        super().__init__()
        self.incremental = incremental
        self.paused = False
        self.app.add_routes(
            [
                web.get("/health_generate", self._ok),
                web.get("/v1/models", self._models),
                web.get("/model_info", self._model_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
                web.post("/pause_generation", self._pause_generation),
                web.post("/continue_generation", self._continue_generation),
                web.post("/update_weights_from_disk", self._update_weights_from_disk),
                web.post("/get_weights_by_name", self._get_weights_by_name),
            ]
        )

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model", "max_model_len": MAX_LENGTH}]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.abort(None if body.get("abort_all") else body["rid"])
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "retract"
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.paused and body["flush_cache"] and not self._running
        self.load(Path(body["model_path"]) / "model.safetensors")
        self.label = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _get_weights_by_name(self, request: web.Request) -> web.Response:
        body = await request.json()
        values = self.weights[body["name"]][: body["truncate_size"]].tolist() if self.weights else []
        return web.json_response(values)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        ends = [] if sampling["ignore_eos"] else sampling["stop_token_ids"]
        order = Order(
            body["rid"],
            body["input_ids"],
            sampling["temperature"],
            sampling["max_new_tokens"],
            ends,
            body["top_logprobs_num"],
        )
        return await self.stream(request, order, self._event)

    def _event(self, so_far: list[Sampled], new: Sampled | None) -> Any:
        told = so_far
        if self.incremental:
            told = so_far[-1:] if new is not None else []
        finish = {"type": "abort"} if new is None else new.finish and {"type": new.finish}
        logprobs = [[each.logprob, each.token, None] for each in told]
        meta = {
            "id": "x",
            "finish_reason": finish or None,
            "completion_tokens": len(so_far),
            "weight_version": self.label,
            "output_token_logprobs": logprobs[1:] if self.fault == "drops logprobs" else logprobs,
            "output_top_logprobs": [[[lp, token, None] for token, lp in each.tops] for each in told],
        }
        return {"text": "", "output_ids": [each.token for each in told], "meta_info": meta}
