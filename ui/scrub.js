// Figures while a slider is moved. What they show at its other positions was worked out before; here it is drawn at once, into
// the figure that stands there: points of Values change sides, the text of Tokens its shades, lines and cells of the other figures
// go where they belong, and so do the lines at the budget. The server's answer, with all that depends on the slider, takes a fifth
// of a second or more; it brings a new figure, and what is drawn here goes with the old one.

const KEPT = 2 // the plane's trace of what is kept
const GONE = 128 // no head keeps a token
const HEAD = 9 // pixels that a line ends before the tip of its arrow
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))
const floats = (text) => new Float32Array(bytes(text).buffer)
const has = (bits, i) => (bits[i >> 3] >> (7 - (i & 7))) & 1
const plotOf = (key) => {
  const plot = document.querySelector(`.st-key-${key} .js-plotly-plot`)
  return plot?._fullLayout && plot
}
const traceOf = (plot, index) =>
  [...plot.querySelectorAll(".scatterlayer .trace")].find((t) => t.__data__?.[0]?.trace.index === +index)

// Two paths, over the points and below the arrows.
function paths(trace, look) {
  const next = trace.nextElementSibling
  if (next?.classList.contains("kv-scrub")) return [next, ...next.children]
  const [group, crosses, dots] = ["g", "path", "path"].map((tag) => document.createElementNS(trace.namespaceURI, tag))
  group.classList.add("kv-scrub")
  crosses.style.cssText = `fill:none;stroke:${look.evicted};stroke-width:${look.line}px`
  dots.style.cssText = `fill:${look.kept};stroke:${look.rim};stroke-width:1px`
  group.append(crosses, dots)
  trace.after(group)
  return [group, crosses, dots]
}

function plane(data) {
  const points = floats(data.points), now = bytes(data.kept), look = data.look
  return (wanted) => {
    const plot = plotOf("plane"), trace = plot && traceOf(plot, KEPT), drawn = trace?.querySelectorAll("path.point")
    if (drawn?.length !== data.count) return // another answer's figure
    const { xaxis, yaxis } = plot._fullLayout
    const arm = Math.abs(yaxis.l2p(look.arm) - yaxis.l2p(0)), r = look.dot / 2
    let [crosses, dots, kept, at] = ["", "", 0, 0]
    for (let i = 0; i < points.length / 2; i++) {
      const was = has(now, i), will = has(wanted, i)
      kept += will
      if (was) drawn[at++].style.visibility = will ? "" : "hidden"
      if (was === will) continue
      const x = xaxis.l2p(points[2 * i]), y = yaxis.l2p(points[2 * i + 1])
      if (will) dots += `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0`
      else crosses += `M${x - arm},${y - arm}L${x + arm},${y + arm}M${x - arm},${y + arm}L${x + arm},${y - arm}`
    }
    const [group, ...both] = paths(trace, look)
    both.forEach((path, i) => path.setAttribute("d", [crosses, dots][i]))
    group.dataset.kept = kept
  }
}

function strip(data) {
  return (wanted) => {
    const tokens = document.querySelector(".kv-strip")?.children
    if (tokens?.length !== wanted.length) return
    wanted.forEach((code, i) => {
      const { classList } = tokens[i], name = data.classes[code % GONE]
      if (classList[0] !== name) classList.replace(classList[0], name)
      classList.toggle("kv-gone", code >= GONE)
    })
  }
}

// The numbers of a figure that change: [place in it, field, how many], and all of them, one after the other, at each position.
function moving(parts, numbers) {
  let at = 0
  return parts.map(([place, field, many, words]) => {
    const own = numbers.subarray(at, (at += many))
    return [place, field, words ? Array.from(own, (i) => words[i]) : own]
  })
}

const inPlot = (plot, [kind, index], field) => {
  const own = (kind === "data" ? plot.data : plot.layout.annotations)?.[index]
  return [own?.[field] ?? own?.marker?.[field]].flat(2)
}
const same = (here, there) =>
  here.length === there.length && there.every((v, i) => Object.is(typeof v === "number" ? Math.fround(here[i] ?? NaN) : here[i], v))

function figure(key, parts) {
  let shown = null // the plot that was found to be one of these
  return (wanted, all) => {
    const plot = plotOf(key)
    if (!plot) return
    const isAt = (known) => moving(parts, known).every(([place, field, v]) => same(inPlot(plot, place, field), v))
    if (shown !== plot && !all().some(isAt)) return // another answer's figure
    shown = plot
    const changed = { data: {}, annotations: {} }
    for (const [[kind, index], field, values] of moving(parts, wanted)) (changed[kind][index] ??= {})[field] = values
    const rows = {}
    for (const [index, fields] of Object.entries(changed.data)) {
      if (fields.z) cells(plot, index, fields.z)
      else rows[index] = line(plot, index, fields)
    }
    bands(plot, rows)
    for (const [index, fields] of Object.entries(changed.annotations)) label(plot, index, fields)
    plot.dataset.kvMoved = (+plot.dataset.kvMoved || 0) + 1
  }
}

const axes = (plot, { xaxis = "x", yaxis = "y" }) =>
  [xaxis, yaxis].map((name) => plot._fullLayout[name.replace(/^(.)/, "$1axis")])

// A line with its markers; returns its points in pixels.
function line(plot, index, changed) {
  const full = plot._fullData[index], trace = traceOf(plot, index), [across, up] = axes(plot, full)
  const x = changed.x ?? full.x, y = changed.y ?? full.y
  const points = Array.from(x, (value, i) => [across.c2p(value), up.c2p(y[i])])
  if (!trace) return points
  const arrow = full.marker?.angleref && full.mode.includes("markers")
  let d = "", gap = true
  const steps = full.line?.shape === "hvh" ? stepped(points) : points
  steps.forEach(([px, py], i) => {
    if (Number.isFinite(px) && Number.isFinite(py)) {
      const [ex, ey] = arrow && i ? before(steps[i - 1], [px, py]) : [px, py]
      d += `${gap ? "M" : "L"}${ex},${ey}`
      gap = false
    } else if (!full.connectgaps) gap = true
  })
  trace.querySelectorAll(".js-line").forEach((path, i) => path.setAttribute("d", i ? "" : d || "M0,0"))
  for (const point of trace.querySelectorAll("path.point")) {
    const { i } = point.__data__, [px, py] = points[i]
    const turned = arrow && i ? turn(points[i - 1], [px, py]) - turn(...wasAt(plot, index, i)) : 0
    point.setAttribute("transform", `translate(${px},${py})` + (turned ? `rotate(${turned})` : ""))
    point.style.visibility = Number.isFinite(px + py) ? "" : "hidden"
    if (changed.symbol) point.setAttribute("d", SYMBOLS[changed.symbol[i]](full.marker.size / 2))
    if (changed.symbol || changed.color) dye(point, (changed.symbol ?? full.marker.symbol)[i], (changed.color ?? full.marker.color)[i])
  }
  return points
}

// The markers that change one by one: circles where a head keeps the token, crosses where it evicts it.
const SYMBOLS = {
  circle: (r) => `M${r},0A${r},${r} 0 1,1 0,${-r}A${r},${r} 0 0,1 ${r},0Z`,
  "x-thin-open": (r) => `M${r},${r}L${-r},${-r}M${r},${-r}L${-r},${r}`,
  "line-ew-open": (r) => `M${r},0L${-r},0`,
}

function dye(point, symbol, colour) {
  Object.assign(point.style, { stroke: colour, fill: symbol.endsWith("-open") ? "none" : colour })
}

// Halfway to the next point the line goes up or down to it.
function stepped(points) {
  return points.flatMap(([x, y], i) => {
    const next = points[i + 1], middle = next && (x + next[0]) / 2
    return next ? [[x, y], [middle, y], [middle, next[1]]] : [[x, y]]
  })
}

const turn = ([x0, y0], [x1, y1]) => (Math.atan2(y1 - y0, x1 - x0) * 180) / Math.PI

function before([x0, y0], [x1, y1]) {
  const length = Math.hypot(x1 - x0, y1 - y0), share = Math.max(0, 1 - HEAD / (length || 1))
  return [x0 + share * (x1 - x0), y0 + share * (y1 - y0)]
}

// Where an arrow's ends stand in the server's figure, in pixels.
function wasAt(plot, index, i) {
  const { x, y } = plot._fullData[index], [across, up] = axes(plot, plot._fullData[index])
  return [i - 1, i].map((j) => [across.c2p(x[j]), up.c2p(y[j])])
}

// What lies between a line and the one after it; Plotly keeps it with the first.
function bands(plot, rows) {
  for (const [index, points] of Object.entries(rows)) {
    const fill = traceOf(plot, index)?.querySelector(".js-fill"), next = rows[+index + 1]
    if (!fill || !next) continue
    fill.setAttribute("d", `M${[...next, ...points.slice().reverse()].filter(([x, y]) => Number.isFinite(x + y)).join("L")}Z`)
  }
}

function label(plot, index, changed) {
  const node = plot.querySelector(`.annotation[data-index="${index}"]`), was = plot.layout.annotations[index]
  const { xaxis, yaxis } = plot._fullLayout
  const by = (axis, from, to) => (to === undefined ? 0 : axis.c2p(to[0]) - axis.c2p(from))
  node?.setAttribute("transform", `translate(${by(xaxis, was.x, changed.x)},${by(yaxis, was.y, changed.y)})`)
}

// A map's cells, over Plotly's picture of them.
function cells(plot, index, z) {
  const full = plot._fullData[index], layer = plot.querySelector(`.subplot.${full.xaxis}${full.yaxis} .heatmaplayer`), [across, up] = axes(plot, full)
  const picture = layer?.querySelector("image"), columns = full.z[0].length
  if (!picture) return
  let group = layer.querySelector(".kv-scrub")
  if (!group) {
    group = layer.appendChild(document.createElementNS(layer.namespaceURI, "g"))
    group.classList.add("kv-scrub")
    z.forEach(() => group.append(document.createElementNS(layer.namespaceURI, "rect")))
    picture.style.visibility = "hidden"
  }
  z.forEach((value, i) => {
    const [row, column] = [Math.floor(i / columns), i % columns], cell = group.children[i]
    const [x0, x1] = [column - 0.5, column + 0.5].map((v) => across.c2p(v))
    const [y0, y1] = [row - 0.5, row + 0.5].map((v) => up.c2p(v))
    const box = { x: x0 + full.xgap / 2, y: Math.min(y0, y1) + full.ygap / 2 }
    Object.assign(box, { width: x1 - x0 - full.xgap, height: Math.abs(y1 - y0) - full.ygap })
    for (const [name, v] of Object.entries(box)) cell.setAttribute(name, v)
    cell.style.fill = colour(full, value)
  })
}

function colour({ colorscale, zmin, zmax }, value) {
  if (Number.isNaN(value)) return "none"
  const at = Math.min(Math.max((value - zmin) / (zmax - zmin), 0), 1)
  const i = Math.max(1, colorscale.findIndex(([stop]) => stop >= at)), [[a, from], [b, to]] = [colorscale[i - 1], colorscale[i]]
  return `color-mix(in srgb, ${to} ${(100 * (at - a)) / (b - a)}%, ${from})`
}

// The lines at the present budget, each on the axis of its figure.
function lines(x) {
  for (const line of document.querySelectorAll(".kv-here")) {
    const [low, high, log] = ["low", "high", "log"].map((key) => +line.dataset[key])
    line.style.setProperty("--at", ((log ? Math.log10(x) : x) - low) / (high - low))
  }
}

// Where the pointer is on a line's axis.
function valueAt(line, clientX) {
  const [low, high, left, right, log] = ["low", "high", "left", "right", "log"].map((key) => +line.dataset[key])
  const place = line.offsetParent.getBoundingClientRect()
  const at = low + ((clientX - place.left - left) / (place.width - left - right)) * (high - low)
  return log ? 10 ** at : at
}

const SETS = { plane, strip }

let stop = () => {} // ends what the call before has begun: Streamlit calls again with new data, and ends only the last

export default function ({ data: { packed, wait }, setTriggerValue }) {
  stop()
  let [ended, asking, held] = [false, 0, false]
  const ask = () => {
    clearTimeout(asking)
    if (wait && !ended && !held) asking = setTimeout(() => setTriggerValue("more", true), wait)
  }
  stop = () => {
    ended = true
    clearTimeout(asking)
  }
  unpacked(packed).then((data) => {
    if (ended) return
    const chosen = (position) => {
      held = position === undefined
      if (position) setTriggerValue("dragged", position)
      ask()
    }
    const end = follow(data, ask, chosen), before = stop
    stop = () => (before(), end())
    ask()
  })
  return () => stop()
}

async function unpacked(text) {
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"))
  return new Response(stream).json()
}

// Watch the sliders, and the handles of the lines at the budget; returns what ends that.
// moved: told of every move; chosen: that a line is held, and then at which position it was let go, or null where it was before.
function follow(data, moved, chosen) {
  const draw = SETS[data.kind]?.(data)
  const figures = Object.entries(data.figures ?? {}).map(([key, { parts, sets }]) => {
    const all = () => Object.values(sets).flatMap((slider) => Object.values(slider).map(floats))
    return [figure(key, parts), sets, all]
  })
  const move = (slider, position) => {
    const [wanted, x] = [data.sides, data.lines].map((known) => known?.[slider]?.[position])
    if (wanted) draw(bytes(wanted))
    if (x !== undefined) lines(x)
    for (const [show, sets, all] of figures) {
      const numbers = sets[slider]?.[position]
      if (numbers) show(floats(numbers), all)
    }
    for (const [key, known] of Object.entries(data.html ?? {})) {
      const place = document.querySelector(`.st-key-${key} [data-testid=stHtml]`), text = known[slider]?.[position]
      if (place && text) place.innerHTML = text
    }
    moved()
  }
  const watching = new MutationObserver((changes) => {
    for (const { target, oldValue } of changes) {
      const slider = data.sliders.find((key) => target.closest(`.st-key-${CSS.escape(key)}`))
      const position = target.getAttribute("aria-valuetext")
      if (slider && position !== oldValue) move(slider, position) // a slider that is drawn again says the same again
    }
  })
  watching.observe(document.body, { subtree: true, attributeFilter: ["aria-valuetext"], attributeOldValue: true })
  const [budget] = data.sliders, places = Object.entries(data.lines?.[budget] ?? {})
  const endDrag = drag((line, clientX) => {
    const to = +line.dataset.log ? Math.log : (x) => x, at = to(valueAt(line, clientX))
    const far = ([, x]) => Math.abs(to(x) - at)
    return places.reduce((best, each) => (far(each) < far(best) ? each : best), places[0])?.[0]
  }, (position) => move(budget, position), chosen)
  return () => (watching.disconnect(), endDrag())
}

// Drag a line by its handle: `find` says which position is nearest, `show` draws it.
function drag(find, show, chosen) {
  let line = null, start = null, now = null
  const all = new AbortController(), on = (name, act) => document.addEventListener(name, act, { signal: all.signal })
  on("pointerdown", (event) => {
    if (event.button || !event.target.classList?.contains("kv-here")) return
    event.preventDefault()
    line = event.target
    line.classList.add("kv-held")
    start = now = find(line, event.clientX)
    chosen()
  })
  on("pointermove", (event) => {
    const position = line && find(line, event.clientX)
    if (position && position !== now) show((now = position))
  })
  const letGo = () => {
    if (!line) return
    line.classList.remove("kv-held")
    line = null
    chosen(now === start ? null : now)
  }
  on("pointerup", letGo)
  on("pointercancel", letGo)
  return () => all.abort()
}
