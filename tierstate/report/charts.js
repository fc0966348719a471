// Draws the charts of a report from the numbers that are embedded in the page, and keeps a served page up to date.
"use strict";
(() => {
  const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#7f8c8d"];
  const STATE_COLORS = {
    "dropped": ["#d5dbe2", "#3a4653"], "left out": ["#f0d58c", "#8a7228"], "whole": ["#2a9d6f", "#2f9e73"],
    "in part": ["#8fd0b4", "#1f6b4e"], "owed": ["#f08c2e", "#f08c2e"], "failed": ["#d62f4b", "#ff5c77"],
    "unreadable": ["#8b1fa8", "#c66be0"],
  };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const paper = window.matchMedia("print");
  let data = null;
  let drawn = [];

  const isDark = () => dark.matches && !paper.matches;
  const ink = () => (isDark() ? { text: "#c5d0dc", line: "#313b47", back: "#171d25" } : { text: "#3c4956", line: "#dfe4ea", back: "#ffffff" });

  const seconds = (value) => {
    if (value == null) return "–";
    if (value === 0) return "0 s";
    if (value < 0.001) return `${+(value * 1e6).toPrecision(3)} µs`;
    if (value < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
    if (value < 120) return `${+value.toPrecision(3)} s`;
    if (value < 7200) return `${+(value / 60).toPrecision(3)} min`;
    if (value < 172800) return `${+(value / 3600).toPrecision(3)} h`;
    return `${+(value / 86400).toPrecision(3)} d`;
  };
  const size = (value) => {
    if (value == null) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (Math.abs(value) >= 1000 && at < units.length - 1) { value /= 1024; at += 1; }
    return `${+value.toPrecision(3)} ${units[at]}`;
  };
  const share = (value) => (value == null ? "–" : `${+(100 * value).toPrecision(3)} %`);

  const steps = (run) => run.axis.first.map((first, i) => (first === run.axis.last[i] ? `${first}` : `${first}–${run.axis.last[i]}`));
  const seen = (run) => run.tiers.filter((tier) => tier.visible);
  const colorOf = (run, name) => COLORS[run.tiers.findIndex((tier) => tier.name === name) % COLORS.length];

  const base = (run, format) => ({
    animation: false,
    color: COLORS,
    backgroundColor: "transparent",
    textStyle: { color: ink().text, fontFamily: getComputedStyle(document.body).fontFamily },
    grid: { left: 12, right: 18, top: 44, bottom: 34, containLabel: true },
    legend: { type: "scroll", top: 0, left: 0, textStyle: { color: ink().text } },
    tooltip: { trigger: "axis", renderMode: "richText", confine: true, valueFormatter: format },
    xAxis: {
      type: "category", data: steps(run), name: "step", nameLocation: "middle", nameGap: 24,
      axisLabel: { hideOverlap: true, color: ink().text }, axisLine: { lineStyle: { color: ink().line } }, nameTextStyle: { color: ink().text },
    },
  });
  // Round marks: for bytes in their own units, and the last one above the largest value.
  const marks = (most, bytes) => {
    if (!most) return {};
    let unit = 1;
    while (bytes && most / unit >= 1000) unit *= 1024;
    const rough = most / unit / 4;
    const ten = 10 ** Math.floor(Math.log10(rough));
    const interval = unit * ten * [1, 2, 2.5, 5, 10].find((one) => one * ten >= rough);
    return { interval, min: 0, max: interval * Math.ceil(most / interval) };
  };
  const valueAxis = (format, more) => ({
    type: "value", axisLabel: { formatter: format, color: ink().text, hideOverlap: true }, splitLine: { lineStyle: { color: ink().line } },
    ...more,
  });
  // Runs that are beside each other have one scale.
  const largest = (lists) => {
    let most = 0;
    for (const list of lists) for (const value of list) if (value != null && value > most) most = value;
    return most || undefined;
  };
  const line = (name, values, color, more) => ({
    type: "line", name, data: values, itemStyle: { color }, lineStyle: { width: 1.6, color }, connectNulls: true,
    showSymbol: values.filter((value) => value != null).length < 60, symbolSize: 5, emphasis: { disabled: true }, ...more,
  });

  const CHARTS = {
    timeline(run) {
      const tiers = seen(run).map((tier) => tier.name);
      const cells = [];
      seen(run).forEach((tier, y) => {
        for (let x = 0; x < run.axis.time.length; x += 1) {
          for (let state = data.states.length - 1; state > 0; state -= 1) {
            if (tier.states[state][x]) { cells.push([x, y, state]); break; }
          }
        }
      });
      const pieces = data.states.map((name, value) => ({ value, label: name, color: (STATE_COLORS[name] || ["#fff", "#000"])[isDark() ? 1 : 0] }))
        .filter((piece) => piece.value > 0 && cells.some((cell) => cell[2] === piece.value));
      return {
        ...base(run), legend: undefined,
        grid: { left: 12, right: 18, top: 34, bottom: 34, containLabel: true },
        tooltip: {
          renderMode: "richText", confine: true,
          formatter: ({ value: [x, y] }) => {
            const counts = data.states.map((name, state) => [name, seen(run)[y].states[state][x]]).filter(([, count]) => count);
            return `${tiers[y]}, step ${steps(run)[x]}\n${counts.map(([name, count]) => `${name}: ${count}`).join("\n")}`;
          },
        },
        yAxis: { type: "category", data: tiers, inverse: true, axisTick: { show: false }, axisLabel: { color: ink().text }, axisLine: { show: false } },
        visualMap: {
          type: "piecewise", pieces, dimension: 2, orient: "horizontal", top: 0, left: 0, itemWidth: 14, itemHeight: 14, itemSymbol: "rect",
          textStyle: { color: ink().text }, selectedMode: false,
        },
        series: [{
          type: "heatmap", name: "state", data: cells, emphasis: { disabled: true },
          itemStyle: { borderColor: ink().back, borderWidth: run.axis.time.length > 120 ? 0 : 1 },
        }],
        height: Math.max(130, 90 + 34 * tiers.length),
      };
    },
    durations(run) {
      return {
        ...base(run, seconds),
        yAxis: valueAxis(seconds, { type: "log" }),
        series: [
          line("save blocked", run.blocked.longest, ink().text, { lineStyle: { width: 1.6, type: "dotted", color: ink().text } }),
          line("captured", run.captured.longest, ink().text, { lineStyle: { width: 1.6, type: "dashed", color: ink().text } }),
          ...seen(run).map((tier) => line(`in ${tier.name}`, tier.arrival.longest, colorOf(run, tier.name))),
        ].map((one) => ({ ...one, data: one.data.map((value) => (value === 0 ? null : value)) }))
          .filter((one) => one.data.some((value) => value != null)),
      };
    },
    exposure(run) {
      const all = data.runs.flatMap((one) => seen(one).map((tier) => tier.exposure));
      return {
        ...base(run, seconds),
        yAxis: valueAxis(seconds, marks(largest(all))),
        series: seen(run).filter((tier) => tier.persistent).map((tier) => line(tier.name, tier.exposure, colorOf(run, tier.name), { step: "end" })),
      };
    },
    bytes(run) {
      const tiers = seen(run);
      const bar = (name, key, color) => ({
        type: "bar", stack: "bytes", name, data: tiers.map((tier) => tier[key]), itemStyle: { color }, barMaxWidth: 26, emphasis: { disabled: true },
      });
      return {
        ...base(run, size),
        grid: { left: 12, right: 36, top: 44, bottom: 34, containLabel: true },
        tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, renderMode: "richText", confine: true, valueFormatter: size },
        xAxis: valueAxis(size, marks(largest(data.runs.map((one) => seen(one).map((tier) => tier.raw_total))), true)),
        yAxis: { type: "category", data: tiers.map((tier) => tier.name), inverse: true, axisTick: { show: false }, axisLabel: { color: ink().text } },
        series: [
          bar("written", "written_total", COLORS[0]), bar("saved by deduplication", "by_reuse", COLORS[2]),
          bar("saved by codecs", "by_codecs", COLORS[1]), bar("saved by both, version is gone", "by_both", isDark() ? "#4b5866" : "#c3cbd4"),
        ],
        height: Math.max(150, 90 + 34 * tiers.length),
      };
    },
    written(run) {
      const key = run.events ? "written" : "stored";
      const all = data.runs.flatMap((one) => seen(one).map((tier) => tier[one.events ? "written" : "stored"]));
      return {
        ...base(run, size),
        yAxis: valueAxis(size, marks(largest(all), true)),
        series: seen(run).map((tier) => line(tier.name, tier[key], colorOf(run, tier.name))),
      };
    },
    ranks(run) {
      return {
        ...base(run, seconds),
        xAxis: { type: "category", data: run.ranks.map((rank) => `${rank.rank ?? "alone"}`), name: "rank", nameLocation: "middle", nameGap: 24, axisLabel: { color: ink().text } },
        yAxis: valueAxis(seconds),
        series: [["saves blocked", "blocked", COLORS[0]], ["steps waited", "waited", COLORS[1]]].map(([name, key, color]) => ({
          type: "bar", name, data: run.ranks.map((rank) => rank[key]), itemStyle: { color }, barMaxWidth: 40, emphasis: { disabled: true },
        })),
      };
    },
    // A plan: what each interval costs; the marks are the best one, and that of the policy.
    cadence(run) {
      const curves = run.curves.filter((curve) => curve.intervals.length);
      const at = (curve, interval) => {
        const i = curve.intervals.findIndex((one) => one >= interval);
        if (interval == null || i < 1) return null;
        const [a, b] = [curve.intervals[i - 1], curve.intervals[i]].map(Math.log);
        const part = (Math.log(interval) - a) / (b - a);
        return Math.exp(Math.log(curve.shares[i - 1]) * (1 - part) + Math.log(curve.shares[i]) * part);
      };
      const mark = (curve, interval, symbol, color) => {
        const y = at(curve, interval);
        return y == null ? [] : [{ coord: [interval, y], symbol, symbolSize: 11, itemStyle: { color }, label: { show: false } }];
      };
      return {
        ...base({ axis: { first: [], last: [] }, tiers: [] }, share),
        xAxis: { ...valueAxis(seconds, { type: "log" }), name: "interval", nameLocation: "middle", nameGap: 24 },
        yAxis: valueAxis(share, { type: "log" }),
        series: curves.map((curve, i) => line(curve.tier, curve.intervals.map((one, j) => [one, curve.shares[j]]), COLORS[i % COLORS.length], {
          showSymbol: false,
          markPoint: { data: [
            ...mark(curve, curve.best, "circle", COLORS[i % COLORS.length]),
            ...mark(curve, run.now.tiers.find((one) => one.tier === curve.tier).interval, "diamond", ink().text),
          ] },
        })),
      };
    },
    changed: (run) => map(run, run.layers.changed, share, 0, 1, ["#eef3f7", "#7fb8d8", "#0b4f86"], ["#1c2530", "#2b6d9c", "#9fd6ff"]),
    drift: (run) => {
      const known = run.layers.drift.flat().filter((value) => value != null);
      return map(run, run.layers.drift, share, 0, Math.min(1, Math.max(...known, 1e-9)), ["#f7f1ea", "#e0a35c", "#8a3d00"], ["#2a211a", "#a8672b", "#ffc98f"]);
    },
    norms: (run) => {
      const known = run.layers.norms.flat().filter((value) => value != null);
      return map(run, run.layers.norms, (value) => (value == null ? "–" : `${+value.toPrecision(4)}`), Math.min(...known), Math.max(...known),
        ["#f7f3ea", "#e8b04a", "#8a3b00"], ["#241d12", "#a8741f", "#ffd98a"]);
    },
  };

  // Layers by versions; where values are not finite there is a mark.
  function map(run, rows, format, min, max, light, night) {
    const layers = run.layers.layers;
    const cells = rows.flatMap((row, y) => row.map((value, x) => [x, y, value])).filter((cell) => cell[2] != null);
    const marks = run.layers.nonfinite.flatMap((row, y) => row.map((value, x) => [x, y, value])).filter((cell) => cell[2]);
    return {
      ...base(run), legend: undefined,
      grid: { left: 26, right: 18, top: 40, bottom: 34, containLabel: true },
      tooltip: { renderMode: "richText", confine: true, formatter: ({ value: [x, y, value] }) => `${layers[y]}\nstep ${run.layers.steps[x]}: ${format(value)}` },
      xAxis: { ...base(run).xAxis, data: run.layers.steps.map(String) },
      yAxis: { type: "category", data: layers, inverse: true, axisTick: { show: false }, axisLabel: { color: ink().text, width: 170, overflow: "truncate", ellipsis: "…" } },
      visualMap: {
        type: "continuous", min, max, dimension: 2, seriesIndex: 0, orient: "horizontal", top: 0, left: 0, itemHeight: 120, calculable: false,
        text: [format(max), format(min)], textStyle: { color: ink().text }, inRange: { color: isDark() ? night : light },
      },
      series: [
        { type: "heatmap", name: "layers", data: cells, emphasis: { disabled: true }, progressive: 0 },
        { type: "scatter", name: "not finite", data: marks, symbol: "diamond", symbolSize: 9, itemStyle: { color: "#d62f4b" } },
      ],
      height: Math.max(180, 100 + 17 * layers.length),
    };
  }

  // On paper charts have the width of a page.
  function draw(width) {
    for (const chart of drawn) chart.dispose();
    drawn = [];
    for (const place of document.querySelectorAll(".chart")) {
      const option = CHARTS[place.dataset.chart](data.runs[Number(place.dataset.run)]);
      if (option.height) place.style.height = `${option.height}px`;
      delete option.height;
      place.textContent = "";
      const cells = (option.series[0]?.data?.length || 0) > 3000;  // so many are slow as SVG
      const chart = echarts.init(place, null, { renderer: cells ? "canvas" : "svg", width });
      chart.setOption(option);
      drawn.push(chart);
    }
    performance.mark("drawn");
  }

  function read() {
    data = JSON.parse(document.getElementById("report-data").textContent);
    draw();
  }

  // A served page asks again and again; only what has changed is sent.
  async function follow(seconds) {
    let tag = null;
    const live = document.getElementById("live");
    for (;;) {
      await new Promise((done) => setTimeout(done, 1000 * seconds));
      if (document.hidden) continue;
      try {
        const answer = await fetch("body.html", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (answer.status === 200) {
          const open = [...document.querySelectorAll("details")].map((one) => one.open);
          document.querySelector("main").innerHTML = await answer.text();
          document.querySelectorAll("details").forEach((one, i) => { one.open = open[i] || false; });
          read();
        }
        if (answer.ok || answer.status === 304) {
          tag = answer.headers.get("ETag");
          live.textContent = `Live: looked again at ${new Date().toLocaleTimeString()}.`;
        } else live.textContent = `The server says: ${answer.status}.`;
      } catch (error) {
        live.textContent = "The server does not answer; what is shown is as it was.";
      }
    }
  }

  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => drawn.forEach((chart) => chart.resize()), 120);
  });
  dark.addEventListener("change", () => draw());
  window.addEventListener("beforeprint", () => draw(680));
  window.addEventListener("afterprint", () => draw());
  document.addEventListener("DOMContentLoaded", () => {
    read();
    const every = Number(document.body.dataset.refresh || 0);
    if (every) follow(every);
  });
})();
