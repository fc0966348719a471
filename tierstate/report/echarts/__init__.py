"""Apache ECharts, as its project publishes it: the report draws its charts with it."""
