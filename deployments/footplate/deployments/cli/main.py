"""The entry of the command `footplate`.

Every fault that a user can mend ends as one line on standard error and exit code 1; wrong usage is code 2.
"""

from __future__ import annotations

import errno
import os
import sys

import typer

from footplate.deployments.cli.bench import bench_commands
from footplate.deployments.cli.config import config_commands
from footplate.deployments.cli.doctor import doctor
from footplate.deployments.cli.drain_node import drain_node
from footplate.deployments.cli.eval import eval_commands
from footplate.deployments.cli.plan import plan
from footplate.deployments.cli.serve import serve
from footplate.deployments.errors import DeploymentError
from footplate.engine.errors import EngineError
from footplate.platform.cli.audit import audit
from footplate.platform.cli.captures import capture_commands
from footplate.platform.cli.chat import chat
from footplate.platform.cli.errors import CommandError
from footplate.platform.cli.keys import key_commands
from footplate.platform.cli.models import model_commands
from footplate.platform.cli.periods import period_commands, reconcile
from footplate.platform.cli.prices import price_commands
from footplate.platform.cli.quotas import quota_commands
from footplate.platform.cli.routes import route_commands
from footplate.platform.cli.tenants import tenant_commands
from footplate.platform.cli.usage import usage_commands
from footplate.platform.errors import SettingsError
from footplate.tenancy.errors import TenancyError

_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EPIPE, errno.EIO})
application = typer.Typer(
    name="footplate",
    help="Serve language models to a company's teams: OpenAI API, exact limits, private tenants.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
application.command()(serve)
application.command()(doctor)
application.command()(chat)
application.command()(audit)
application.add_typer(capture_commands, name="captures")
application.add_typer(model_commands, name="models")
application.add_typer(tenant_commands, name="tenants")
application.add_typer(key_commands, name="keys")
application.add_typer(quota_commands, name="quotas")
application.add_typer(price_commands, name="prices")
application.add_typer(route_commands, name="routes")
application.add_typer(usage_commands, name="usage")
application.add_typer(period_commands, name="periods")
application.command()(reconcile)
application.add_typer(bench_commands, name="bench")
application.add_typer(config_commands, name="config")
application.add_typer(eval_commands, name="eval")
application.command()(plan)
application.command()(drain_node)


def main() -> None:
    """Run the command line and exit: 0 done, 1 refused or failed, 2 usage."""
    try:
        try:
            application()
        finally:
            # Here, where it can still be said that the output went nowhere.
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(1)
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"footplate: the output can't be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except (CommandError, DeploymentError, TenancyError, EngineError, SettingsError) as error:
        print(f"footplate: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
