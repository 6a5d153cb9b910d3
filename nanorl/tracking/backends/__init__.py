"""One file a metrics backend, imported only when `tracking.backends` names it."""
