raise RuntimeError("the licence server does not answer")
