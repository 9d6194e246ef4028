"""What servers, engines and gateways say to each other, as bytes and as values."""
