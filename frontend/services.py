"""What an endpoint may use: one object with the parts of the process, handed to every `handle`.

`tokenizer` and what needs it exist from the moment the tokenizer is loaded; `require_text` says so to clients who come
too early. Settings that an operator may change at run time are taken over here. This module must not know any endpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from frontend.auth import Authenticator
from frontend.engine import Engine
from frontend.metrics import FrontendMetrics
from frontend.metrics_exchange import MetricsExchange
from frontend.overload import Overload
from frontend.readiness import Readiness
from frontend.request_metrics import RequestLedger
from frontend.submission import Submitter
from frontend.tokenizer import Tokenizer
from frontend.validation import ModelFacts
from pagemill.config import FrontendConfig

#: Fields of the config that are followed while serving; so is the log level, by `pagemill.child`.
_CHANGEABLE = ("api_keys", "admin_keys", "max_queue_time_s", "max_connections")


@dataclass(frozen=True, slots=True)
class TextServices:
    """The part that knows the model's text."""

    tokenizer: Tokenizer
    submitter: Submitter
    facts: ModelFacts


@dataclass(slots=True)
class Services:
    config: FrontendConfig
    readiness: Readiness
    engine: Engine
    ledger: RequestLedger
    metrics: FrontendMetrics
    exchange: MetricsExchange
    overload: Overload
    text: TextServices | None = None
    started: int = field(default_factory=lambda: int(time.time()))  #: seconds; `created` of the models
    authenticator: Authenticator = field(init=False)

    def __post_init__(self) -> None:
        self.take_over(self.config)

    def take_over(self, config: FrontendConfig) -> None:
        """Follows a config that was read anew, in what may change. Requests that have been admitted go on as they began."""
        changed = {name: getattr(config, name) for name in _CHANGEABLE}
        self.config = msgspec.structs.replace(self.config, **changed)
        self.authenticator = Authenticator(config.api_keys, config.admin_keys)
        if self.text is not None:
            self.text.submitter.max_queue_time_s = config.max_queue_time_s

    def load_text(self, tokenizer: Tokenizer) -> None:
        """Called once, when the tokenizer is there."""
        template = tokenizer.chat_template
        facts = ModelFacts(
            names=self.config.model_names,
            vocab_size=tokenizer.vocab_size,
            eos_ids=tokenizer.eos_ids,
            sampling_defaults=tokenizer.sampling_defaults,
            knows_developer=template is not None and template.knows_developer,
            priority_allowed=self.config.priority_allowed,
        )
        self.text = TextServices(tokenizer, Submitter(self.config, tokenizer, self.engine, self.readiness), facts)
        self.readiness.tokenizer_loaded = True

    def require_text(self) -> TextServices:
        """Raises ApiError (503) unless requests can be taken."""
        self.readiness.require()
        assert self.text is not None
        return self.text
