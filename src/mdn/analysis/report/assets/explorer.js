"use strict";
// The mathematics of one step on the direction of a unit key. The lines between the two marks are plain arithmetic on
// purpose: tests/analysis/test_report_page.py evaluates the same text in Python and compares it with numpy and the recurrence.

// <maths>
function pairEigenvalues(alpha, beta, mu, eta, direct) {
  const half = (alpha + mu - alpha * (beta * eta + direct)) / 2;
  const inside = half * half - alpha * mu * (1 - direct);
  const root = Math.sqrt(Math.max(inside, 0));
  const imaginary = Math.sqrt(Math.max(-inside, 0));
  return [half + root, imaginary, half - root, -imaginary];
}
function stepWeight(weight, momentum, alpha, beta, mu, eta, direct, value, feedback) {
  const error = value - feedback * alpha * weight;
  const after = mu * momentum - eta * error;
  return [alpha * weight - beta * after + direct * error, after];
}
// </maths>

const NAMES = ["alpha", "beta", "mu", "eta", "direct"];
const STEPS = 40;
const CLAMP = Math.exp(-2);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function gates() {
  return NAMES.map((name) => Number(byId(name).value));
}

// S along the key after one write of value 1 at step 1: asked with the same key at every later step (feedback 1, values
// 0), or never again (feedback 0).
function response(feedback) {
  const all = gates();
  let weight = 0;
  let momentum = 0;
  const values = [0];
  for (let t = 1; t <= STEPS; t += 1) {
    [weight, momentum] = stepWeight(weight, momentum, ...all, t === 1 ? 1 : 0, feedback);
    values.push(weight);
  }
  return values;
}

function place(id, real, imaginary) {
  byId(id).setAttribute("transform", `translate(${(100 * real).toFixed(3)} ${(-100 * imaginary).toFixed(3)})`);
}

function path(values, top, zero) {
  const points = values.map((y, t) => `${((300 * t) / STEPS).toFixed(1)} ${(zero - ((zero - 20) * y) / top).toFixed(2)}`);
  return "M" + points.join("L");
}

// The smallest of 1, 2, 5 times a power of ten that is not below x.
function roundUp(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= x * 0.999999);
}

function complexText(real, imaginary) {
  const sign = imaginary < 0 ? "−" : "+";
  return imaginary === 0 ? real.toFixed(3) : `${real.toFixed(3)} ${sign} ${Math.abs(imaginary).toFixed(3)}i`;
}

function stepText(modulus, least) {
  const disc = modulus <= 1 ? "inside the unit disc" : "outside the unit disc: it grows";
  return disc + (least >= 0 ? ", in the right half plane" : ", in the left half plane: the sign flips");
}

// The bounds alpha <= 1 / (1 + x^2) and b <= x^2 / (1 + x^2) hold for some x exactly when alpha + b <= 1, where b is the
// whole step: quasi-hyperbolic momentum splits it into beta and direct / eta, Nesterov's momentum has beta = mu b and
// direct = b eta.
function layerText() {
  const [alpha, beta, mu, eta, direct] = gates();
  const nesterov = mu > 0 && direct > 0 && Math.abs(mu * direct - beta * eta) < 2e-3;
  if (nesterov && alpha + beta / mu <= 1 + 1e-9 && mu >= CLAMP) {
    const safe = mu >= (Math.SQRT2 - 1) / 2 && direct <= 1;
    const inside = safe ? "every step stays in the right half plane" : "the right half plane needs μ ≥ 0.207 and δ ≤ 1";
    return `can produce these gates with Nesterov's momentum; inside its bounds ${inside}`;
  }
  const step = direct === 0 ? beta : beta + direct / eta;
  if (alpha + step > 1 + 1e-9) {
    const bound = direct === 0 ? "α + β ≤ 1" : "α + β + δ/η ≤ 1, or with Nesterov's momentum α + β/μ ≤ 1";
    return `cannot produce these gates: its bounds need ${bound}`;
  }
  if (mu > 0 && mu < CLAMP) return `produces these gates only without its clamp μ ≥ exp(−2) = ${CLAMP.toFixed(3)}`;
  if (mu === 0) return "produces these gates without momentum";
  if (direct > 1) return "can produce these gates with quasi-hyperbolic momentum; δ > 1 leaves the right half plane";
  const kind = direct === 0 ? "" : " with quasi-hyperbolic momentum";
  return `can produce these gates${kind}; inside its bounds every step stays in the right half plane`;
}

// Zero is in the middle, or at the bottom when nothing is below it.
function drawResponse(same, other) {
  const all = [...same, ...other];
  const top = roundUp(Math.max(...all.map(Math.abs), 1e-3));
  const below = Math.min(...all) < -0.01 * top;
  const zero = below ? 110 : 200;
  byId("response-same").setAttribute("d", path(same, top, zero));
  byId("response-other").setAttribute("d", path(other, top, zero));
  byId("response-line").setAttribute("d", `M0 ${zero}H300`);
  byId("response-zero").setAttribute("y", String(zero + 4));
  byId("response-top").textContent = String(Number(top.toPrecision(3)));
  byId("response-bottom").textContent = below ? `−${Number(top.toPrecision(3))}` : "";
}

function update() {
  const [alpha, beta, mu, eta, direct] = gates();
  NAMES.forEach((name) => {
    byId(`${name}-value`).textContent = Number(byId(name).value).toFixed(3);
  });
  const [real1, imaginary1, real2, imaginary2] = pairEigenvalues(alpha, beta, mu, eta, direct);
  place("eigenvalue-1", real1, imaginary1);
  place("eigenvalue-2", real2, imaginary2);
  place("eigenvalue-alpha", alpha, 0);
  place("eigenvalue-mu", mu, 0);
  const modulus = Math.max(Math.hypot(real1, imaginary1), Math.hypot(real2, imaginary2));
  drawResponse(response(1), response(0));
  byId("pair-text").textContent = `${complexText(real1, imaginary1)} and ${complexText(real2, imaginary2)}`;
  byId("modulus-text").textContent = modulus.toFixed(4);
  byId("step-text").textContent = stepText(modulus, Math.min(real1, real2));
  byId("layer-text").textContent = layerText();
}

function setGates(values) {
  NAMES.forEach((name, number) => {
    byId(name).value = values[number];
  });
  update();
}

function choose(event) {
  setGates(event.currentTarget.dataset.gates.split(","));
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  byId("theme").setAttribute("aria-pressed", String(!dark));
}

function drawAxes() {
  const grid = byId("response-grid");
  for (let t = 0; t <= STEPS; t += 10) {
    const label = document.createElementNS(SVG, "text");
    label.setAttribute("x", String((300 * t) / STEPS));
    label.setAttribute("y", "215");
    label.setAttribute("text-anchor", "middle");
    label.textContent = String(t);
    grid.append(label);
  }
}

// A table that is wider than the page says that it scrolls.
function markOverflow() {
  document.querySelectorAll(".scroll").forEach((area) => {
    area.classList.toggle("overflows", area.scrollWidth > area.clientWidth + 1);
  });
}

const presets = document.querySelectorAll("button[data-gates]");
NAMES.forEach((name) => byId(name).addEventListener("input", update));
presets.forEach((button) => button.addEventListener("click", choose));
byId("theme").addEventListener("click", toggleTheme);
addEventListener("resize", markOverflow);
drawAxes();
setGates(presets[0].dataset.gates.split(","));
markOverflow();
