"""The frontend process: loads the codec, binds both links, and serves."""

from functools import partial
from pathlib import Path

from overlap_spec import features
from overlap_spec.config import Settings
from overlap_spec.features import absent_fields
from overlap_spec.frontend.client_endpoint import ClientEndpoint
from overlap_spec.frontend.codec import Codec, IdsOnly, load_codec
from overlap_spec.frontend.hooks import attached
from overlap_spec.frontend.open_requests import UIDS_OF_A_FRONTEND
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.frontend.service import FrontendService
from overlap_spec.messages import (
    CLIENTS_OF_A_FRONTEND,
    FrontendFacts,
    NewFrontend,
    Terms,
    ToFrontend,
    ToScheduler,
)
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.runtime.transport import BatchOutlet, Inbox


async def main(context: ActorContext) -> None:
    """Run until Shutdown. Cancellation: the endpoint is closed; open requests get no answer."""
    settings = context.settings
    inbox = context.step_inbox(features.link(ToFrontend, settings.features), spins=False)
    scheduler: BatchOutlet[ToScheduler] = context.queued_outlet("scheduler")
    if context.was_started_alone:
        scheduler.send(NewFrontend(context.generation))  # while the codec loads, steps end and slots become free
    codec = make_codec(settings)
    checks = make_checks(settings, codec)
    with ClientEndpoint(context.zmq, settings.link, context.endpoints.client()) as endpoint:
        endpoint.router.number_from(context.generation * CLIENTS_OF_A_FRONTEND)
        service = FrontendService(codec, checks, scheduler, endpoint.router, context.send_supervisor)
        service.number_from(context.generation * UIDS_OF_A_FRONTEND)
        if context.generation > 0:
            service.expect_returns()
        service.trace = service.rows.trace = context.trace
        service.report_alive = context.report_alive
        parts = service.parts(settings, context.generation)
        service.attach(attached(features.modules(features.FRONTEND, settings.features), parts, absent_fields()))
        service.renew = partial(_renewed, context)
        context.ready(FrontendFacts(codec.name, endpoint.address, codec.chat_template))
        try:
            await service.serve(inbox)
        finally:
            service.hooks.close()


def make_codec(settings: Settings) -> Codec:
    """The model's tokenizer, or none. Raises: CheckpointError."""
    directory = settings.model.files.tokenizer_dir
    if settings.skip_tokenizer_init or directory is None:
        return IdsOnly()
    return load_codec(Path(directory), settings.model.files.chat_template)


def _renewed(context: ActorContext, generation: int) -> tuple[Inbox[ToFrontend], BatchOutlet[ToScheduler]]:
    """Links to a new scheduler; messages of the old one are lost."""
    context.renew(generation)
    link = features.link(ToFrontend, context.settings.features)
    return context.step_inbox(link, spins=False), context.queued_outlet("scheduler")


def make_checks(settings: Settings, codec: Codec) -> RequestChecks:
    """Checks with the model's EOS ids, or its tokenizer's if the model names none."""
    eos_token_ids = settings.model.files.eos_token_ids or codec.eos_token_ids
    link = settings.link
    checks = RequestChecks(eos_token_ids, link.max_queued_requests, settings.scheduler.seed, link.trusts_templates)
    checks.flags = Terms(timeout_s=link.request_timeout_s, first_token_timeout_s=link.first_token_timeout_s)
    checks.admin_key = link.admin_key
    return checks
