"""Usage events, prices, ledger, periods and exports."""
